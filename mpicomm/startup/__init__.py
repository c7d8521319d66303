"""How a job comes together: who is where, which device is whose, where the store is."""
