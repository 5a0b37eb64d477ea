"""``make bench-gpu``: what a CUDA card makes of the drafter and of the real pair, against torch and against bytes."""
