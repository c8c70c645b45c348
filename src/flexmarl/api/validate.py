"""`flexmarl.validate`: says what a configuration resolves to, and refuses what would go wrong before a model loads."""

from dataclasses import dataclass

from flexmarl.api.build import CheckedInputs, check_inputs
from flexmarl.config import RootConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """What a valid configuration resolves to."""

    lines: list[str]
    """One statement each, for people."""
    warnings: list[str]
    """What may be wrong; also among the lines."""


_GROUP_KEYS = {
    "agent": "(query, agent): one reward per trajectory, shared by all turns of the agent",
    "query": "(query, policy): one reward per trajectory, the mean over the policy's acting agents",
    "agent_turn": "(query, agent, branch, turn): the turn's reward",
}


def validate(config: RootConfig) -> ValidationReport:
    """Check a configuration and everything it points to.

    Raises:
        ConfigError: something is wrong; says what, where and the fix.
    """
    inputs = check_inputs(config, is_thorough=True)
    pipeline = config.pipeline
    lines = [
        f"workflow {config.workflow.path}",
        f"data: {len(inputs.train_queries)} training queries, {len(inputs.held_out_queries)} held-out queries",
        f"step: {pipeline.queries_per_step} queries x {pipeline.trajectories_per_query} trajectories",
        f"run: {pipeline.num_steps} steps, mode {pipeline.mode}, seed {config.run.seed}",
    ]
    for name, policy in config.policies.items():
        agents = sorted(agent for agent, setup in config.agents.items() if setup.policy == name)
        algorithm = config.algorithm_of(name)
        lines.append(f"policy {name}: model {policy.model}, agents {', '.join(agents)}{_model_facts(inputs, name)}")
        lines.append(f"policy {name}: group key {_GROUP_KEYS[algorithm.group_key]}")
        lines.append(
            f"policy {name}: normaliser {algorithm.normaliser}, truncated turns are "
            f"{'masked' if algorithm.truncated == 'mask' else 'trained'}"
        )
    lines.append(_dry_run_line(inputs))
    warnings = [*_data_warnings(config, inputs), *(() if inputs.workflow is None else inputs.workflow.warnings)]
    lines += [f"warning: {warning}" for warning in warnings]
    lines.append("valid")
    return ValidationReport(lines=lines, warnings=warnings)


def _model_facts(inputs: CheckedInputs, policy: str) -> str:
    if policy not in inputs.models:
        return ""
    facts = inputs.models[policy]
    return (
        f", context {facts.context_tokens} tokens, vocabulary {facts.vocab_size} "
        f"(tokenizer {facts.num_tokenizer_ids}), stops at token ids {list(inputs.tokenizers[policy].stop_token_ids)}"
    )


def _data_warnings(config: RootConfig, inputs: CheckedInputs) -> list[str]:
    num_held_out = len(inputs.held_out_queries)
    if not 0 < num_held_out < config.eval.num_queries:
        return []
    return [f"eval.num_queries={config.eval.num_queries}, but there are only {num_held_out} held-out queries"]


def _dry_run_line(inputs: CheckedInputs) -> str:
    if inputs.workflow is None:
        return "dry run: off (workflow.dry_run=false)"
    return f"dry run: {inputs.workflow.num_episodes} episodes with scripted answers"
