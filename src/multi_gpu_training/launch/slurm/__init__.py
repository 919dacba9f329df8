"""Slurm: write a job, submit it, follow it; and what runs inside the job."""
