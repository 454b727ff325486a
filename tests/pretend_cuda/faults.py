"""Faults in code for a device, and the tests that find them: `test_faults.py` plants one at a time.

Each fault is a change of one line of ddpforge that a CPU does not show: results there are the same, or nearly so.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: `old`, which is in `file` of the package once, becomes `new`; then each of `tests` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # in tests/


def _counts(test: str, case: str) -> str:
    return f"pretend_cuda/test_counts.py::test_{test}[{case}]"


def _waits(case: str) -> str:
    return _counts("the_host_waits_for_nothing_between_rows", case)


def _launches(case: str) -> str:
    return _counts("a_step_launches_few_kernels_more", case)


def _peak(case: str) -> str:
    return _counts("peak_memory_is_that_of_the_loop_by_hand", case)


def _part(test: str) -> str:
    return f"pretend_cuda/test_device_code.py::test_{test}"


def _trains(test: str) -> str:
    return f"pretend_cuda/test_training.py::test_{test}"


_LARGE_BATCH = _part("a_large_batch_is_copied_on_its_own_stream_which_the_other_waits_for")
_STAGED = _part("the_host_waits_for_a_staged_checkpoint_only_where_it_is_written")
_ORDER_OF_STAGING = (
    "checkpoint/test_staging.py::"
    "test_weights_and_optimizer_state_are_copied_during_the_next_passes_and_the_rest_before_them"
)
_TWO_GPUS = _trains("two_gpus_train_like_two_ranks_on_the_cpu[ddp]")

FAULTS = (
    # -- the host waits for the device
    Fault(
        "the gradient norm is read in each step",
        "training/stepping.py",
        "self.norms.add(step, norm)",
        "self.norms.add(step, torch.tensor(norm.item()))",
        (_waits("mlp fp32 single"),),
    ),
    Fault(
        "reading a norm counts as free on a GPU",
        "training/loop.py",
        "return device_kind(device).is_host\n",
        "return True\n",
        (_waits("mlp fp32 single"),),
    ),
    Fault(
        "clipping reads the norm",
        "strategies/torch_replica.py",
        "return device_kind(self.precision.device).is_host and norm.item()",
        "return norm.item()",
        (_waits("mlp fp32 single"),),
    ),
    Fault(
        "the host decides if a step is skipped",
        "strategies/precision.py",
        "on_device = kind.fuses_optimizers and not kind.is_host",
        "on_device = False",
        (_waits("mlp fp32 single"),),
    ),
    Fault(
        "losses are copied to the host in each step",
        "training/step.py",
        "loss_total(loss, counted)",
        "loss_total(loss.cpu(), counted)",
        (_waits("mlp fp32 single"),),
    ),
    Fault(
        "fp16: the loss scale is read in each step",
        "strategies/precision.py",
        "        super().update(optimizer, norm)\n        self.scaler.update()",
        "        super().update(optimizer, norm)\n        self.scaler.update(self.scaler.get_scale())",
        (_waits("mlp fp16 single"),),
    ),
    Fault(
        "fp16: the host decides if buffers are restored",
        "training/buffers.py",
        "if not self._values:",
        "if norm.isfinite().item():",
        (_waits("mlp fp16 single"),),
    ),
    # -- copies
    Fault(
        "batches are not pinned",
        "data/fetching.py",
        "if self.pin else micros",
        "if False else micros",
        (_waits("mlp fp32 single"),),
    ),
    Fault(
        "the host waits for the copy of a batch",
        "data/pytree.py",
        "return batch.to(device, non_blocking=True)",
        "return batch.to(device)",
        (_waits("mlp fp32 single"), _LARGE_BATCH),
    ),
    Fault(
        "small batches take a stream of their own",
        "data/pytree.py",
        "_SMALL = 256 << 10",
        "_SMALL = 0",
        (_counts("copies_and_events_of_a_step", "mlp fp32 single"), _part("a_small_batch_needs_no_stream")),
    ),
    Fault(
        "training does not wait for the stream that copies a batch",
        "data/pytree.py",
        "    here.wait_stream(aside)\n",
        "",
        (_LARGE_BATCH,),
    ),
    Fault(
        "memory of a batch is reused while another stream reads it",
        "data/pytree.py",
        "leaf.record_stream(here)",
        "pass",
        (_part("memory_of_a_large_batch_is_free_when_the_stream_that_reads_it_is_done"),),
    ),
    Fault(
        "the number of targets is sent from memory that is not pinned",
        "ranks/collectives.py",
        "values = values.pin_memory()",
        "pass",
        (_waits("gpt-124m fp32 ddp"),),
    ),
    Fault(
        "a row of metrics is sent from memory that is not pinned",
        "ranks/metric_reduction.py",
        "(row.pin_memory() if device_kind(device).pins else row)",
        "row",
        (_part("numbers_of_the_host_join_those_of_the_device_in_pinned_memory"),),
    ),
    Fault(
        "fp16: the loss scale is on the host",
        "strategies/precision.py",
        '        if gradients_on is not None and gradients_on.type == "cpu" != device.type:',
        "        if gradients_on is not None:\n            gradients_on = torch.device('cpu')",
        (_waits("mlp fp16 single"),),
    ),
    # -- tensors in the wrong place
    Fault(
        "positions of a GPT are on the CPU",
        "builtin/models/gpt.py",
        "self.context.positions(tokens.shape[1], tokens.device)",
        'self.context.positions(tokens.shape[1], "cpu")',
        (_trains("losses_are_those_of_the_cpu[gpt-fp32-1e-06]"),),
    ),
    Fault(
        "averaged weights are on the CPU",
        "builtin/callbacks/ema.py",
        "[_at_least_fp32(tensor).clone() for",
        "[_at_least_fp32(tensor).cpu() for",
        (_trains("ema_and_its_checkpoint_are_those_of_the_cpu"),),
    ),
    Fault(
        "all ranks choose the first GPU",
        "ranks/devices.py",
        "local if local < count else 0",
        "0",
        (_TWO_GPUS,),
    ),
    Fault(
        "batches go to the first GPU",
        "data/pytree.py",
        "return batch.to(device, non_blocking=True)",
        "return batch.to(torch.device(device.type, 0), non_blocking=True)",
        (_TWO_GPUS, _LARGE_BATCH),
    ),
    Fault(
        "the rank's GPU is not the current one",
        "ranks/join.py",
        "            kind.make_current(device.index)  # a mesh",
        "            pass  # a mesh",
        (_trains("fsdp_without_a_launcher_names_its_gpu_to_torch"),),
    ),
    Fault(
        "the thread that writes checkpoints uses the first GPU",
        "ranks/writers.py",
        "self._kind.make_current(self._device)",
        "pass",
        (_part("the_thread_that_writes_checkpoints_has_the_device_of_its_rank"),),
    ),
    # -- memory
    Fault(
        "outputs are kept during the backward pass",
        "training/step.py",
        "        heartbeat.beat(heartbeat.BACKWARD)\n",
        "        heartbeat.beat(heartbeat.BACKWARD)\n        self._outputs = outputs\n",
        (_peak("gpt bf16 single"),),
    ),
    Fault(
        "gradients are kept during the next forward pass",
        "strategies/gradients.py",
        "if self._missing and parameter.grad is not None",
        "if parameter.grad is not None",
        (_peak("gpt bf16 single"),),
    ),
    Fault(
        "DDP's buckets are copies of the gradients",
        "strategies/ddp.py",
        '"gradient_as_bucket_view": gradient_as_bucket_view,',
        '"gradient_as_bucket_view": False,',
        ("strategies/test_ddp.py::test_the_options_are_passed_to_the_wrapped_model",),
    ),
    Fault(
        "memory for checkpoints is not page-locked",
        "checkpoint/staging.py",
        'registers = locked is not None and locked.type == "cuda"',
        "registers = locked = None",
        (
            _trains("background_saves_are_staged_in_pinned_memory_and_equal_blocking_ones[single]"),
            _STAGED,
        ),
    ),
    Fault(
        "the peak of memory is not measured anew",
        "interfaces/device.py",
        "        self.module.reset_peak_memory_stats(device)\n",
        "",
        (_part("the_peak_is_measured_anew"),),
    ),
    # -- kernels
    Fault(
        "bf16 on a GPU without autocast",
        "strategies/precision.py",
        "self.forward = partial(torch.autocast, device.type, dtype=dtype)",
        'self.forward = partial(torch.autocast, "cpu", dtype=dtype)',
        (_peak("gpt bf16 single"),),
    ),
    Fault(
        "the flag of a norm takes several kernels",
        "strategies/precision.py",
        "return found.float()",
        "return (~torch.isfinite(norm)).to(found.dtype)",
        (_launches("mlp fp32 single"),),
    ),
    Fault(
        "norms of gradients are computed one by one",
        "strategies/torch_replica.py",
        'compat.foreach("norm", dense)',
        "[torch.linalg.vector_norm(one) for one in dense]",
        (_launches("mlp fp32 single"),),
    ),
    Fault(
        "gradients are clipped one by one",
        "strategies/torch_replica.py",
        "torch.nn.utils.clip_grads_with_norm_(self.gradients.trained, largest, norm)",
        "torch.nn.utils.clip_grads_with_norm_(self.gradients.trained, largest, norm, foreach=False)",
        (_launches("mlp fp32 single"),),
    ),
    Fault(
        "the optimizer is not fused",
        "builtin/optim/optimizers.py",
        "    return all(p.is_floating_point()",
        "    return False and all(p.is_floating_point()",
        (_launches("mlp fp32 single"),),
    ),
    # -- numbers
    Fault(
        "fp16: gradients keep their loss scale",
        "strategies/torch_replica.py",
        "        self.precision.unscale(self.optimizer)\n",
        "",
        (_trains("gradients_of_fp16_are_read_without_their_loss_scale"),),
    ),
    Fault(
        "the fused optimizer gets no flag",
        "strategies/precision.py",
        "fused.found_inf = self._is_nonfinite(norm)",
        "fused.found_inf = None",
        (_trains("step_without_a_finite_gradient_is_skipped_on_the_device[single-nan]"),),
    ),
    Fault(
        "the device's random numbers have no seed",
        "data/rng.py",
        "        kind.seed(seed, device)",
        "        pass",
        (_part("seeds_reach_the_generator_of_the_rank_s_device"),),
    ),
    Fault(
        "random numbers of the device are not restored after the comparison with the whole model",
        "guard/reference_check.py",
        "    kind.set_rng_state(state, device)\n",
        "",
        (_part("the_state_of_the_device_s_generator_is_restored"),),
    ),
    Fault(
        "tensor parallelism does not restore the random numbers that ranks share",
        "strategies/tensor/tensor_parallel.py",
        "        self._kind.set_rng_state(device, self._device)\n",
        "",
        (_part("the_state_of_the_device_s_generator_is_restored"),),
    ),
    # -- checkpoints
    Fault(
        "the host waits while a checkpoint is staged",
        "checkpoint/staging.py",
        "copy_(first, non_blocking=kind.has_streams)",
        "copy_(first, non_blocking=False)",
        (_STAGED,),
    ),
    Fault(
        "an update does not wait for the copy of the weights",
        "checkpoint/staging.py",
        "device_kind(gpu).current_stream(gpu).wait_event(end)",
        "pass",
        (_STAGED, _ORDER_OF_STAGING),
    ),
    Fault(
        "the copy of a checkpoint does not wait for the last update",
        "checkpoint/staging.py",
        "            aside.wait_stream(kind.current_stream(gpu))\n",
        "",
        (_ORDER_OF_STAGING,),
    ),
    Fault(
        "a checkpoint is written before its copy is complete",
        "checkpoint/staging.py",
        "            end.synchronize()",
        "            pass",
        (_STAGED, _ORDER_OF_STAGING),
    ),
)
