"""What to do with a recording of the scheduler: look at it, replay it with other settings, make a page of it."""
