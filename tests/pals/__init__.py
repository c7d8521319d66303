"""A stand-in for PALS and Cray MPICH, with which HPE Cray systems under PBS start ranks."""
