"""Ranks in the pods of a Kubernetes cluster: the manifest of a job, and its submission."""
