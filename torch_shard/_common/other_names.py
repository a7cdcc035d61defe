"""Names that users of DDP, FSDP, accelerate and JAX look for in the package, and what is written in their place."""

_HERE = {
    "Nothing wraps the model: a plan says what lies where, plan=ts.plans.replicated() of ts.make_train_step.": (
        "DDP DataParallel DistributedDataParallel ddp"
    ),
    "Nothing wraps the model: a plan says what lies where, plan=ts.plans.fsdp(model, mesh) of ts.make_train_step.": (
        "FSDP FSDP2 FullyShardedDataParallel MixedPrecisionPolicy ZeRO fsdp fully_shard shard shard_model zero"
    ),
    "A plan says what lies where: plan=ts.plans.fsdp_tp(model, mesh) of ts.make_train_step.": (
        "DTensor distribute_module distribute_tensor fsdp_tp parallelize parallelize_module tensor_parallel tp"
    ),
    "ts.make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=plan) makes a step of what the script has.": (
        "Accelerator accelerate compile make_step prepare step train_step value_and_grad_step"
    ),
    "The loop is ts.fit(step, None, loader, steps=1000), or transformers' own: ts.hf.Trainer.": (
        "SFTTrainer Trainer TrainingArguments train trainer"
    ),
    'torch.save(model.state_dict(), "model.pt") has the values of the last step. A run is saved by '
    'ts.Checkpointer("run"), weights are written by ts.export_safetensors(state, "trained").': (
        "save save_checkpoint save_model save_pretrained save_safetensors save_state save_state_dict"
    ),
    "model.load_state_dict(...) reaches the next step. A run goes on by ts.Checkpointer, weights are read onto their "
    "shards by ts.load_safetensors and ts.load_torch.": (
        "from_pretrained load load_checkpoint load_model load_state load_state_dict restore"
    ),
    "Processes are joined by ts.initialize(), which reads the launcher's environment.": (
        "distributed init init_distributed init_process_group setup"
    ),
    "Devices with names for their axes are ts.make_mesh(batch=4, model=2).": (
        "DeviceMesh Mesh create_mesh get_mesh init_device_mesh mesh"
    ),
    "Give ts.fit the dataset itself, with batch_size=: each process reads its rows. A loader gives the rows of all "
    "devices, without a sampler.": "DataLoader DistributedSampler Loader Sampler data_loader prepare_data_loader",
    "bfloat16 needs no scaler: compute_dtype=torch.bfloat16 of ts.make_train_step.": "GradScaler amp autocast bf16",
    "The step clips: clip_grad_norm=1.0 of ts.make_train_step.": "clip_grad_norm clip_grad_norm_ clip_grad_value_",
    "The number of this process is jax.process_index(), that of all jax.process_count().": (
        "get_rank get_world_size is_main_process local_rank process_index rank world_size"
    ),
    "A collator pads to few lengths, pad_to_multiple_of= of transformers; TRL packs, SFTConfig(packing=True).": (
        "bucket pack packing"
    ),
    "JAX draws which devices hold which part: jax.debug.visualize_array_sharding(tensor.jax()), or of "
    "state.params[name]; print(plan.resolve(model, mesh)) is a table of all entries.": (
        "Drawing visualize_array_sharding visualize_sharding"
    ),
    "A plan and its rules are of jax.sharding: from jax.sharding import PartitionSpec as P.": "P PartitionSpec",
}
_ANSWERS = {name: answer for answer, names in _HERE.items() for name in names.split()}

OF_PLANS = {
    **dict.fromkeys(
        ("ddp", "dp", "data_parallel", "replicate"), "it is plans.replicated(), with the batch split as always."
    ),
    "from_logical": (
        "logical axes are named by recipes and rules here: those of MaxText that split over fsdp and tensor are "
        'plans.fsdp_tp(model, mesh, fsdp="fsdp", tp="tensor"), others are entries of ts.ShardingPlan, such as '
        '{"**.up_proj.weight": P("tensor", None)}. docs/guides/plans.md has the mapping.'
    ),
    "from_accelerate": (
        "the sizes of a ParallelismConfig are axes of ts.make_mesh(dp_replicate=2, dp_shard=4), and the plan is "
        'plans.hsdp(model, mesh, replicate="dp_replicate", fsdp="dp_shard"); with tp_size, '
        'plans.from_hf(model, mesh, tp="tp", fsdp="dp_shard"). docs/guides/plans.md has the mapping.'
    ),
}
"""The same for `torch_shard.plans`."""


def answer_to(name: str, public: list[str]) -> str:
    """What is written in the place of a name that the package does not have; empty where nobody can know.

    Args:
        name: As it was asked for.
        public: The names that there are.
    """
    if name in _ANSWERS:
        return _ANSWERS[name]
    return f"It is called ts.jax_{name}." if f"jax_{name}" in public else ""
