"""The Megatron data-parallel replica of a cell: weights in and out, tree attention, gradients, Adam, checkpoints."""
