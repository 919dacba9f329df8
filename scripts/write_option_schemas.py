"""Write recipes/options.json, from which help, completion and `mgt config-schema` know the recipes.

Run it after a change of a recipe's options or defaults; tests/recipes/test_option_schemas.py
fails until then.
"""

from __future__ import annotations

import json

from multi_gpu_training.recipes.option_schemas import FILE, declared

if __name__ == "__main__":
    FILE.write_text(json.dumps(declared(), indent=1) + "\n")
    print(f"wrote {FILE}")
