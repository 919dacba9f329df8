"""Recipes: whole trainings that a person reads and copies.

This list is what `mgt recipes` prints and what the tests run through.
"""

from __future__ import annotations

RECIPES = {
    "image": "image classifier (MLP or CNN) on digits, MNIST or Fashion-MNIST",
    "speech": "speech recogniser (LMU, CTC) on digits, LibriSpeech or a built-in synthetic voice",
    "transformer": "language model (causal or masked) or text classifier of Hugging Face",
    "video": "behaviour classifier (3D CNN) on rendered clips or videos with annotations",
    "ppo": "recurrent PPO (CLSTM) that trades, or plays any Gymnasium environment",
}
