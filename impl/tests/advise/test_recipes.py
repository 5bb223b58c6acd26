"""Settings whose outcome is public: the adviser agrees, and where it does not, ``recipes.toml`` says why."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from steelyard.advise import Job, Setting, check, gpu_named
from steelyard.advise.predictions import Predictions
from steelyard.cost import ModelShape
from steelyard.parallel import ParallelLayout

RECIPES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "recipes.toml").read_text("utf-8"))["recipe"]
# GPUs of which only the memory counts here.
MEMORY = {"h20": 95.6, "a100-40": 40.0}


def shape_of(recipe: dict[str, Any]) -> ModelShape:
    shape = ModelShape(**recipe["shape"]) if "shape" in recipe else ModelShape.preset(recipe["model"])
    longest = recipe["max_prompt"] + recipe["max_response"]
    return dataclasses.replace(shape, max_positions=max(shape.max_positions, longest))


def job_of(recipe: dict[str, Any]) -> Job:
    name = recipe["gpu"]
    gpu = dataclasses.replace(gpu_named("h100"), name=name, gib=MEMORY[name]) if name in MEMORY else gpu_named(name)
    return Job(
        shape_of(recipe),
        recipe["gpus"],
        gpu,
        recipe["max_prompt"],
        recipe["max_response"],
        roles=tuple(recipe.get("roles", ["actor"])),
        rollout_share=recipe.get("rollout_share", 0.0),
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["name"])
def test_adviser_and_publication_agree(recipe: dict[str, Any], predictions: Predictions) -> None:
    setting = Setting(ParallelLayout(**recipe["layout"]), **recipe["setting"])
    fit = check(job_of(recipe), setting, predictions)
    agrees = fit.fits == recipe["runs"]
    assert agrees == ("expected_miss" not in recipe), fit.why
