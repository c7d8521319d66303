"""Programs of other libraries on the job that `bootstrap()` forms; each needs an extra of the package."""
