"""Faults in the code that uses accelerators of any vendor above the backend: trainer, benchmarks, checks, examples."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- the trainer ----------------------------------------------------------------------------------------
    Mutant(
        "randomness.states",
        old="generators[device.type] = torch.get_device_module(device).get_rng_state(device)",
        new="pass",
        fault="A checkpoint lacks the state of the GPU's generator.",
        tests="tests/unit/test_training_state.py -k generator_of_a_device",
    ),
    Mutant(
        "randomness.restore",
        old="module.set_rng_state(generators[device.type], device)",
        new="pass",
        fault="A resumed run draws other numbers on its GPU than the uninterrupted run.",
        tests="tests/unit/test_training_state.py -k generator_of_a_device",
    ),
    Mutant(
        "randomness.restore",
        old="module.manual_seed_all(_seed_of(generators['torch']))",
        new="pass",
        fault="A run that is resumed on another type of device draws the numbers of its first steps again.",
        tests="tests/unit/test_training_state.py -k another_type_of_device",
    ),
    Mutant(
        "randomness._seed_of",
        old="state.numpy().tobytes()",
        new="b''",
        fault="All checkpoints, on all ranks, give the generator of another type of device the same seed.",
        tests="tests/unit/test_training_state.py -k another_type_of_device",
    ),
    Mutant(
        "reporting._memory",
        old='device.type != "cpu"',
        new="False",
        fault="The trainer reports the memory of the process as that of the GPU.",
        tests="tests/unit/test_reporting.py -k gpu_of_any_vendor",
    ),
    Mutant(
        "Reporter.log",
        old="self._gpu_utilization.append(percent)",
        new="pass",
        fault="The summary of a run lacks the utilization of the GPUs.",
        tests="tests/unit/test_reporting.py -k gpu_of_any_vendor",
    ),
    Mutant(
        "StepProfiler._start",
        old='[torch.profiler.ProfilerActivity.CPU] if self._world.device.type == "cpu" else None',
        new="[torch.profiler.ProfilerActivity.CPU]",
        fault="A profile lacks the kernels of the GPU.",
        tests="tests/training/test_profiles.py -k accelerator_of_any_vendor",
        ranks=2,
    ),
    Mutant(
        "parallel._moved",
        old="torch.__future__.set_swap_module_params_on_conversion(True)",
        new="pass",
        fault="On the device of an extension of torch the optimizer updates parameters that the model has replaced.",
        tests="tests/unit/test_training_state.py -k keeps_its_parameters",
    ),
    Mutant(
        "Checkpoints.__init__",
        old="accelerator.select",
        new="id",
        fault="The thread that saves checkpoints works on the first GPU, in memory of another rank.",
        tests="tests/gpu/test_trainer.py -k thread_that_saves",
        ranks=2,
    ),
    Mutant(
        "Trainer.__init__",
        old='world.device.type != "cpu"',
        new="False",
        fault="Batches are copied to the GPU from memory that is not pinned, so that each copy blocks.",
        tests="tests/gpu/test_trainer.py -k pinned",
        ranks=2,
    ),
    Mutant(
        "accelerator.peak_memory",
        old="0 if read is None else read(device)",
        new="0",
        fault="The trainer reports no memory of the GPU.",
        tests="tests/gpu/test_trainer.py -k memory_of_an_entry",
        ranks=2,
    ),
    # -- benchmarks -----------------------------------------------------------------------------------------
    Mutant(
        "compared_backends.select",
        old="{_GLOO, of_torch, *_WITH_MPI}",
        new="names",
        fault="The backend of a vendor whose devices the ranks share is measured, and fails without a remedy.",
        tests="tests/bench/test_operations.py -k not_available",
    ),
    Mutant(
        "compared_backends.select",
        old="_GLOO if is_host else plan.vendor_part(world.backend)",
        new="_GLOO",
        fault="On GPUs the vendor's backend is not compared.",
        tests="tests/bench/test_operations.py -k backend_of_their_vendor",
    ),
    Mutant(
        "compared_backends.select",
        old="dict.fromkeys((*known, of_torch))",
        new="known",
        fault="The backend of an accelerator that is neither NVIDIA's nor Intel's is not compared.",
        tests="tests/bench/test_operations.py -k backend_of_their_vendor",
    ),
    Mutant(
        "timing.on_ranks_of",
        old="torch.accelerator.synchronize",
        new="lambda: None",
        fault="Benchmarks on GPUs measure the time of the calls only.",
        tests="tests/unit/test_benchmarks.py -k device_of_any_vendor",
    ),
    Mutant(
        "overlap.measure",
        old="bench.settle()",
        fault="The computation that is to overlap on a GPU is calibrated to the time of its calls.",
        tests="tests/unit/test_benchmarks.py -k completes_its_computation",
    ),
    # -- checks ---------------------------------------------------------------------------------------------
    Mutant(
        "gpu_check.check",
        old="facts.build.startswith(platform)",
        new="facts.build",
        fault="On a host with GPUs of AMD the doctor recommends another driver for a torch with CUDA.",
        tests="tests/unit/test_doctor.py -k test_gpus",
    ),
    Mutant(
        "gpu_check.collect",
        old='_PLATFORMS.get(vendor) or build.partition(" ")[0] or CUDA',
        new="CUDA",
        fault="The doctor recommends a torch with CUDA on a host with GPUs of AMD.",
        tests="tests/unit/test_doctor.py -k platform_of_the_gpus",
    ),
    Mutant(
        "gpu_check.collect",
        old='accelerators.vendor or ""',
        new="''",
        fault="Without rocm-smi the doctor recommends a torch with CUDA on a host with GPUs of AMD.",
        tests="tests/unit/test_doctor.py -k kernels_files_show",
    ),
    Mutant(
        "gpu_check._list_gpus",
        old="if listed := listed_by(tool.command[0], queries.output_of(tool.command)):",
        new="if (listed := listed_by(tool.command[0], queries.output_of(tool.command))) or True:",
        fault="The doctor asks the tool of NVIDIA's driver only.",
        tests="tests/unit/test_doctor.py -k platform_of_the_gpus",
    ),
    Mutant(
        "gpu_check._format_gpus",
        old='f"driver {version[1]}" if version[0] else ""',
        new='f"driver {version[1]}"',
        fault="For a tool that does not list the driver, the doctor shows the name of the GPU as the driver's version.",
        tests="tests/unit/test_doctor.py -k does_not_list_the_driver",
    ),
    # -- adapters -------------------------------------------------------------------------------------------
    Mutant(
        "WorldEnvironment.__init__",
        old='world.device.type != "cpu"',
        new='world.device.type == "cuda"',
        fault="With Lightning on GPUs of Intel, ranks train on other GPUs than those that bootstrap() has selected.",
        tests="tests/integrations/test_lightning.py -k does_not_select",
    ),
    Mutant(
        "nccl_built",
        old="10_000 * major + 100 * minor + patch",
        new="1_000 * major + 100 * minor + patch",
        fault="Horovod's scripts see another version of NCCL.",
        tests="tests/horovod/test_tensor_operations.py -k version_of_nccl",
        ranks=2,
    ),
]
