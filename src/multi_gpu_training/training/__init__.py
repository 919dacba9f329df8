"""Train: loss weighting, the step, the trainers, the manager."""
