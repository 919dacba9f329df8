"""Before a run: check the machine, measure, estimate and forecast, verify the result."""
