"""An ordinary training script for torchrun, before and after the change that makes it run under srun and mpirun.

Under torchrun both versions give the same results.

    $ diff examples/existing_script/before.py examples/existing_script/after.py
    10a11,12
    > import mpicomm
    >
    13c15
    <     dist.init_process_group()
    ---
    >     mpicomm.bootstrap()

    $ torchrun --nproc-per-node 2 examples/existing_script/before.py
    epoch 0: loss 0.0401
    epoch 1: loss 0.0104
    epoch 2: loss 0.0087
    2 ranks found the weights 1.00, 2.00, 3.00

    $ torchrun --nproc-per-node 2 examples/existing_script/after.py
    epoch 0: loss 0.0401
    epoch 1: loss 0.0104
    epoch 2: loss 0.0087
    2 ranks found the weights 1.00, 2.00, 3.00

    $ mpirun -n 4 python examples/existing_script/after.py
    epoch 0: loss 0.9629
    epoch 1: loss 0.0317
    epoch 2: loss 0.0092
    4 ranks found the weights 1.00, 1.99, 2.99
"""
