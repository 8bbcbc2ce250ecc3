"""The local stack: a team's servers on this machine, as `infra/stack.yaml` lists them, started and watched by supervisor."""
