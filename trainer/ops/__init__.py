"""The operators of a GPT, forward and backward: attention, rotary positions, and the loss without whole logits."""
