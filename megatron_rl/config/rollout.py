"""What is played, and the check before the first update."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_rl.section import Section


class RepetitionConfig(Section):
    """When an episode counts as stuck: it is truncated, as `repetition`, after the turn that shows it, also where it is
    evaluated."""

    identical_actions: int = Field(0, ge=0)
    """So many equal actions in a row; 0: never."""
    ngram: int = Field(0, ge=0)
    """Longest n-gram that is looked for at the end of an action, its stop token left out; 0: never."""
    ngram_times: int = Field(8, ge=2)
    """How often an n-gram must follow itself there."""


class CurriculumConfig(Section):
    """Levels of rising difficulty. Evaluation is always played on the plain `environment_options`."""

    levels: tuple[dict[str, Any], ...] = ()
    """Easiest first: what each level changes in `environment_options`; `{}` is the task itself. None: no curriculum."""
    promote_at: float = Field(0.8, gt=0, le=1)
    """Success rate over the window that ends a level."""
    window: int = Field(64, ge=1)
    """Last finished episodes of the level that the rate is taken over."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> CurriculumConfig:
        if len(self.levels) == 1:
            raise ValueError(
                "one level is no curriculum: add levels, or put its options into rollout.environment_options and set "
                "rollout.curriculum.levels to []"
            )
        return self


class RolloutConfig(Section):
    """What is played, how much of it, and with which sampling."""

    environment: str = "frozen_lake"
    """Name of a text environment."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment."""
    episodes: int = Field(64, ge=1)
    """Episodes per iteration, over all ranks."""
    max_turns: int = Field(10, ge=1)
    """Turns after which an episode is truncated."""
    max_action_tokens: int = Field(1, ge=1)
    """Tokens the policy may sample per turn."""
    repetition: RepetitionConfig = Field(default_factory=RepetitionConfig)
    """When an episode is cut because it repeats itself."""
    stagger_turns: int = Field(0, ge=0)
    """Training episodes start after 0 to so many random valid actions, the same for a group; 0: at the beginning."""
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """Easier variants of the task that training begins with."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer scales its logits by the same."""
    max_failed: float = Field(0.5, ge=0, le=1)
    """Largest share of an iteration's episodes that may fail (`environment_error`, `aborted`, never started)."""
    on_bad_record: Literal["error", "quarantine"] = "error"
    """Refuse a batch with a bad trajectory, or set the trajectory aside."""
    engine_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the embedded engine; null: that of the model."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """When episodes are played: on demand, during the update before theirs, or up to `max_staleness` versions ahead."""
    engine: Literal["embedded", "vllm", "vllm_http"] = "embedded"
    """Who generates: the embedded engine, a vLLM inside the rollout process, or vLLM servers."""
    servers: tuple[str, ...] = ()
    """Addresses of vLLM servers, for instance `http://node7:8000`; none: the rollout process starts one itself."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM: fields of `engines.vllm.options.VllmOptions`."""
    max_staleness: int = Field(1, ge=0)
    """Versions between the weights that sampled a trajectory's oldest token and those it trains; for mode `async`."""
    stragglers: Literal["drop", "deliver"] = "drop"
    """Trajectories that took longer than `max_staleness` allows: left out, or left to `algorithm.stale_decisions`."""
    complete_groups: bool = True
    """An iteration takes whole groups only; false: the next finished trajectories, whoever they are (SAO)."""
    concurrency: int = Field(64, ge=1)
    """Episodes that the rollout process has in flight."""
    episode_timeout: float = Field(3600.0, gt=0)
    """Seconds after which the rollout process ends an episode as aborted."""
    step_timeout: float = Field(300.0, gt=0)
    """Seconds an environment may take for one step in the rollout process."""
    engine_timeout: float = Field(0.0, ge=0)
    """Seconds after which the rollout process makes an engine call again; 0: as long as the episode may take."""
    engine_retries: int = Field(3, ge=0)
    """How often the rollout process repeats a failed engine call before the episode is aborted."""
    stagger_seconds: float = Field(0.0, ge=0)
    """The rollout process begins its first `concurrency` episodes spread over this time."""
    shard_episodes: int = Field(16, ge=1)
    """Finished episodes after which the rollout process writes a shard."""
    shard_seconds: float = Field(1.0, gt=0)
    """Seconds after which it writes the episodes it has."""
    external: bool = False
    """The rollout process is started by others (another SLURM component), not by the trainer's first rank."""
    colocated: bool = False
    """Trainer and rollout process share their GPUs: the engine sleeps while the trainer works, and the reverse."""
    restarts: int = Field(3, ge=0)
    """How often the trainer starts a rollout process of its own again after it died."""
    start_timeout: float = Field(900.0, gt=0)
    """Seconds the rollout process may take to give its first sign of life."""
    heartbeat_timeout: float = Field(60.0, gt=0)
    """Seconds without a sign of life after which the rollout process counts as dead."""
    trainer_timeout: float = Field(0.0, ge=0)
    """Seconds without progress of the trainer after which the rollout process gives up; 0: it waits."""
    disk_patience: float = Field(600.0, ge=0)
    """Seconds the rollout process goes on trying to write a shard that the disk refuses."""
    recorded: str = ""
    """Directory of recorded rollouts to train on instead of playing: a run directory, or one of shards."""

    @property
    def staleness(self) -> int:
        """Versions that playing may run ahead of training."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]

    @property
    def has_process(self) -> bool:
        """Whether a rollout process plays, not the trainer's own ranks."""
        return not self.recorded and (self.mode != "sync" or self.engine != "embedded" or self.colocated)

    @property
    def training_options(self) -> tuple[dict[str, Any], ...]:
        """The environment's options in training: those of every level, or the plain ones without a curriculum."""
        return tuple({**self.environment_options, **level} for level in self.curriculum.levels or ({},))

    @model_validator(mode="after")
    def _no_contradiction(self) -> RolloutConfig:
        if self.colocated and self.staleness:
            raise ValueError("colocated engine and trainer take turns: set mode to sync, or colocated to false")
        if self.servers and self.engine != "vllm_http":
            raise ValueError("servers are for engine 'vllm_http': set engine to vllm_http, or servers to []")
        if self.stagger_turns and self.environment == "prompts":
            raise ValueError("a prompt has no turns that its episodes could start after: set stagger_turns to 0")
        return self


class FirstStepCheckConfig(Section):
    """The first-step check: before the first update, trainer and engine must agree on what was sampled."""

    enabled: bool = True
    """Check before the first update."""
    max_k3: float = Field(0.01, gt=0)
    """Largest mean k3 between recomputed and recorded log-probs, nats."""
    max_extreme: float = Field(0.01, ge=0, le=1)
    """Largest share of tokens with a probability ratio beyond 2."""
    max_rescore: float = Field(1e-3, gt=0)
    """Largest |log-ratio| between two scorings with other micro-batches."""
