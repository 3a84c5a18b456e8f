"""``farandole`` as a backend of torch.distributed: its process groups on our engines."""
