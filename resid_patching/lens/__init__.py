"""Reading what the model would predict from the middle of its stream."""
