"""`mgt bench`: what a training costs on this machine, measured case by case.

bench_tables     single, DP and DDP side by side; samples per GPU; precision
tuning           the settings of DDP
result_table     results as a table, JSON and a picture
run_comparison   the same for results of runs: `comparison_report`
"""
