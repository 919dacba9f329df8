"""Watch: metrics, the run folder, the log, what a person sees."""
