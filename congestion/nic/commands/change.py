"""`netlayer nic apply | rollback`: what changes a host, and does nothing without `--apply`."""

from __future__ import annotations

import click

from congestion.nic.commands.host_options import (
    HostOptions,
    alone,
    count,
    draw_plan,
    draw_with,
    elsewhere,
    give,
    of_host,
    open_host,
    open_state,
    profile_option,
    state_option,
    summed,
)


@click.command()
@profile_option
@state_option
@click.option("--apply", is_flag=True, help="Do it; without this the plan is printed and nothing is done.")
@click.option("--partial", is_flag=True, help="Do what can be done, and leave what the NICs cannot.")
@of_host
def apply(options: HostOptions) -> None:
    """Make a profile so: the old values are kept first, each write is read back, all is undone if one does not hold.

    Done twice, it changes nothing. A process that died on the way is undone by `netlayer nic rollback --apply`.
    Nothing is reset: what needs a reset of the firmware says so.

    \b
    Examples:
      netlayer nic apply --profile examples/profiles/lossless-dcqcn.toml
      netlayer nic apply --profile examples/profiles/lossless-dcqcn.toml --apply
      netlayer nic apply --profile examples/profiles/tuned-dcqcn.toml --apply --hosts hosts.txt
    """
    # Imported in the function: `--help` then loads neither pydantic nor the plan.
    from congestion.nic.commands.shown import print_left, print_note, print_plan
    from congestion.nic.profile.apply import apply_plan

    if elsewhere(options, "apply"):
        return
    if not options.apply:
        # No lock and no state folder: a look must work for any user, and without --state below another root.
        host_plan, _tree, _tools = draw_plan(options)
        give(options, summed(host_plan) | {"applied": False})
        if not alone(options):
            print_plan(host_plan)
        print_note("nothing was changed: give --apply to do it")
        return
    # The function and not its plan: `apply_plan` calls it under the lock, for its old values are what an undo restores.
    draw, tree, tools = draw_with(options)
    done = apply_plan(draw, tree, tools, open_state(options), partial=options.partial)
    host_plan = done.plan
    # `Plan.changes` omits rows that cannot run (programs, under --root): here they still count as left.
    not_done = [*done.left, *(row for row in host_plan.rows if not row.runs)]
    # Without a change, all is as wanted only if nothing was left and nothing was impossible.
    idle = "nothing was changed" if not_done or host_plan.cannots else "everything is as the profile wants it"
    summary = f"{count(len(done.rows), 'value')} changed" if done.rows else idle
    changed = [
        {"device": row.step.device, "name": row.step.name, "old": row.old, "new": row.step.new} for row in done.rows
    ]
    give(options, {"profile": host_plan.profile.name, "applied": True, "changed": changed, "summary": summary})
    if not alone(options):
        for row in done.rows:
            # A trigger is among the rows, and has no old value.
            click.echo(f"{row.step.device} {row.step.name}: {row.old or '-'} -> {row.step.value}")
        click.echo(summary)
    print_left("left", host_plan.cannots, not_done)
    if done.rows:
        print_note("undo it with: netlayer nic rollback --apply")


@click.command()
@state_option
@click.option("--apply", is_flag=True, help="Do it; without this it is only said what would be undone.")
@click.option("--partial", is_flag=True, help="Close the journal though something cannot be restored.")
@click.option("--force", is_flag=True, help="Also over values that somebody else has set since.")
@of_host
def rollback(options: HostOptions) -> None:
    """Undo the change that did not end, else the last one that did. Each call goes one change further back.

    A value that is neither the old one nor ours was set by another hand since: it is named and left, without --force.

    \b
    Examples:
      netlayer nic rollback
      netlayer nic rollback --apply
    """
    from congestion.nic.commands.shown import print_note
    from congestion.nic.profile.apply import roll_back, was_rebooted

    if elsewhere(options, "rollback"):
        return
    tree, tools = open_host(options)
    state = open_state(options)
    if not options.apply:
        # The same choice as in `roll_back`, but without `reopen`: a look renames no journal.
        journal, failed = state.find_open() or state.last_applied(), list[str]()
    else:
        undone = roll_back(tree, tools, state, partial=options.partial, force=options.force)
        journal, failed = undone or (None, [])
    entries = (
        # Last change first, as they are undone. Folders and triggers of the journal have no value to restore.
        [] if journal is None else [entry for entry in reversed(journal.entries) if entry.kind in ("file", "tool")]
    )
    verb = "restored" if options.apply else "would be restored"
    summary = f"{count(len(entries) - len(failed), 'value')} {verb}" if journal else "there is no change to undo"
    # A file's old value is kept byte by byte, with the newline that the kernel prints.
    back = [{"target": " ".join([entry.target, *entry.fields]), "value": entry.old.strip()} for entry in entries]
    give(options, {"applied": options.apply, "restored": back, "failed": failed, "summary": summary})
    if not alone(options):
        for row in back:
            click.echo(f"{row['target']}: {row['value']}")
        click.echo(summary)
    for text in failed:
        print_note(f"not restored: {text}")
    # Most of these settings live in the driver only: after a boot, values are the defaults, not what was applied.
    if journal and was_rebooted(journal, tree):
        print_note("the host was started again since that change: what does not last was gone already")
    if journal and not options.apply:
        print_note("nothing was changed: give --apply to do it")
