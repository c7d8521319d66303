"""TensorFlow on the ranks of the job: MultiWorkerMirroredStrategy learns handwritten digits.

`mpicomm.integrations.tensorflow.cluster_resolver` describes the cluster to TensorFlow, whose own collectives then sum
the gradients. Afterwards the ranks check by `mpicomm` that they have the same parameters.

    $ mpirun -n 4 python -m mpicomm.examples.integrations.tensorflow_digits
    4 workers
    test accuracy 97.8% of 360 images
    parameters identical on all ranks
    $ torchrun --nproc-per-node 2 examples/integrations/tensorflow_digits.py
    2 workers
    test accuracy 97.8% of 360 images
    parameters identical on all ranks
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it when it is imported

import numpy as np
import tensorflow as tf

import mpicomm
from mpicomm.examples.ddp import load_digits
from mpicomm.integrations.tensorflow import cluster_resolver

EPOCHS, BATCH, LEARNING_RATE = 15, 64, 4e-3
GOAL = 0.9


def main() -> None:
    world = mpicomm.bootstrap()
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver(world))
    (images, labels), (test_images, test_labels) = (
        (each.tensors[0].numpy(), each.tensors[1].numpy()) for each in load_digits()
    )
    with strategy.scope():
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential(
            [tf.keras.layers.Input((64,)), tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)]
        )
        optimizer = tf.keras.optimizers.Adam(LEARNING_RATE)

    @tf.function
    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> None:
        strategy.run(update, args=(batch,))

    def update(batch: tuple[tf.Tensor, tf.Tensor]) -> None:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], model(batch[0], training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))  # sums over the workers

    # Each worker gets its share of each batch.
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=0)
    batches = strategy.experimental_distribute_dataset(data.batch(BATCH, drop_remainder=True))
    for _ in range(EPOCHS):
        for batch in batches:
            step(batch)
    accuracy = float(np.mean(np.argmax(model(test_images), axis=1) == test_labels))
    by_rank = mpicomm.all_gather([each.numpy() for each in model.trainable_variables])
    identical = all(
        np.array_equal(first, other)
        for parameters in by_rank
        for first, other in zip(by_rank[0], parameters, strict=True)
    )
    if world.rank == 0:
        print(f"{strategy.num_replicas_in_sync} workers")
        print(f"test accuracy {accuracy:.1%} of {len(test_labels)} images")
        print(f"parameters {'identical' if identical else 'DIFFERENT'} on all ranks", flush=True)
    assert identical
    assert accuracy > GOAL


if __name__ == "__main__":
    main()
