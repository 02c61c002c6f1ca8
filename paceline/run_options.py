"""
What the commands take that list, mark, report and track runs: `paceline runs ...`, `report` and `track`; as options.py.
"""

from paceline.command_line import option, positional
from paceline.options import ANY_RUN, RUN, TRACKERS, JsonOption, RunsOption


class RunsOptions(JsonOption):
    """List the runs, the latest first: state, steps, val_bpb, tok/s.

    $ paceline runs --json | jq .[0].val_bpb
    """

    dir: str = positional("DIR", "the folder that holds the runs", default="runs")


class RunsShowOptions(JsonOption, RunsOption):
    """Show one run: why each attempt ended, what was done next, and where the time went.

    $ paceline runs show books
    """

    run: str = positional("RUN", RUN)


class RunsTagOptions(RunsOption):
    """Add tags to a run, or remove them; without tags, print those that it has.

    They stand in the list of runs, and the browser finds runs by them. The file is notes.json in the run folder.

    $ paceline runs tag books baseline wide
    """

    run_and_tags: tuple[str, ...] = positional("RUN TAG", f"{RUN}; then its tags, words without spaces")
    remove: bool = option(False, "remove these tags")


class RunsNoteOptions(RunsOption):
    """Write a note about a run, which stands in the list of runs in the browser; without a text, print the one it has.

    $ paceline runs note books "the first run with the new text"
    """

    run_and_text: tuple[str, ...] = positional("RUN TEXT", f"{RUN}; then the note, where an empty one removes it")


class ReportOptions(RunsOption):
    """Write one run, or the log of any training, to one file: HTML or Markdown.

    Curves, explanation, plan against measurement, where the time went, events, config, machine and samples. The HTML file
    needs no server and no network. docs/web.md.

    $ paceline report books --markdown
    """

    run: str = positional("RUN", ANY_RUN)
    markdown: bool = option(False, "write Markdown, for an issue, to standard output")
    output: str | None = option(None, "the file to write, or - for standard output; auto: NAME.html here", value="FILE")


class TrackOptions(RunsOption):
    """Send the metrics and health of a run to TensorBoard, W&B or trackio.

    Each step is sent once: what was sent before is skipped. A run that is still active is followed until it ends. docs/trackers.md.

    $ paceline track books --to tensorboard
    """

    run: str = positional("RUN", RUN)
    to: str = option("", f"the trackers, separated by commas: {', '.join(TRACKERS)}", value="TRACKERS")
