"""The run config: one RUN.yaml, validated without importing torch."""

from paralign.config.load import load_config as load_config
from paralign.config.load import resolve_config as resolve_config
from paralign.config.model_choice import build_model as build_model
from paralign.config.run import RunConfig as RunConfig
