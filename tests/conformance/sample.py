"""The tests that `--sample` runs: one or two fast tests of each kind, which exist in torch 2.8 and 2.15."""

from __future__ import annotations

NAMES = frozenset(
    {
        "test_Backend_enum_class",
        "test_DistributedDataParallelCPU",
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_DistributedDataParallel_requires_grad",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_all_gather",
        "test_all_gather_coalesced_simple",
        "test_all_gather_complex",
        "test_all_gather_object_default_pg",
        "test_all_reduce_coalesced_sum",
        "test_all_reduce_max",
        "test_all_reduce_sum",
        "test_all_reduce_sum_async",
        "test_all_reduce_sum_complex",
        "test_all_to_all",
        "test_all_to_all_single_equal_split_full_group",
        "test_all_to_all_single_unequal_split",
        "test_barrier",
        "test_batch_isend_irecv_gloo",
        "test_broadcast",
        "test_ddp_logging_data_cpu",
        "test_destroy_full_group",
        "test_gather",
        "test_get_future",
        "test_irecv",
        "test_isend",
        "test_monitored_barrier_gloo",
        "test_reduce_product",
        "test_scatter",
        "test_scatter_object_list",
        "test_send_recv",
        "test_send_recv_any_source",
        "test_send_recv_with_tag",
        "test_static_graph_api_cpu",
    }
)
