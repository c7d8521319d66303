"""The backend under load: asynchronous operations and DDP steps, compared with Gloo."""
