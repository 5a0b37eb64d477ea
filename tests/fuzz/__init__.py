"""The engine without a model: random traffic over slots, rings and scheduler, against plain lists."""
