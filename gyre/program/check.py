"""`gyre.py check`: what a configuration would do, without a device, an engine or torch."""

from gyre.config.schema import Settings
from gyre.schedule.placement import describe_placement
from gyre.tasks.harbor import load_tasks
from gyre.train.capabilities import describe_training
from gyre.train.model_config import read_model_config


def describe(settings: Settings) -> str:
    """Placement, memory, training and tasks of a configuration as text for a terminal.

    Raises ConfigError for a model or a layout that the trainer refuses.
    """
    params_bytes = sum(path.stat().st_size for path in settings.model.path.glob("*.safetensors"))
    lines = [describe_placement(settings, params_bytes or None).rstrip()]
    lines.append(describe_training(read_model_config(settings.model.path), settings.layout))
    folders = {"train": settings.tasks.train, "held out": settings.tasks.held_out}
    for name, folder in folders.items():
        if folder is None:
            continue
        found = load_tasks(folder)
        lines.append(f"tasks ({name}): {len(found.tasks)} in {folder}, {len(found.refused)} refused")
        lines += [f"  refused {path.name}: {reason}" for path, reason in sorted(found.refused.items())]
    return "\n".join(lines) + "\n"
