"""Check this machine and explain how to fix problems.

The exit code is 1 if something that llmrun needs does not work. Missing optional parts are only notes.

Examples:
    llmrun doctor
    llmrun doctor --offline --json
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.cli.arguments import options
from llmrun.cli.arguments.flags import takes_flags
from llmrun.cli.console.output import out
from llmrun.options.settings import Settings, load_sound_settings

LISTING = {"place": 150}


@dataclass(frozen=True, slots=True)
class DoctorFlags:
    """The flags of `llmrun doctor`, in the order of --help."""

    json: options.Json = False
    offline: options.Offline = False
    quiet: options.Quiet = False
    verbose: options.Verbose = False
    debug: options.Debug = False

    def settings(self) -> Settings:
        """Load the settings for this run and configure `out` with them. The report lists invalid settings."""
        given: dict[str, object] = {"offline": self.offline or None, "quiet": self.quiet or None}
        settings, _ = load_sound_settings(given)
        out.quiet, out.verbose, out.color = settings.quiet, self.verbose, settings.color
        return settings


@takes_flags(DoctorFlags)
def command(*, flags: DoctorFlags) -> int:
    settings = flags.settings()
    from llmrun.cli.console.progress import LiveReporter
    from llmrun.cli.doctoring import look_at_terminal, show_json, show_report
    from llmrun.jobs.doctor.examine import Machine, examine

    with LiveReporter() as waiting:
        report = examine(
            Machine(settings.offline), lambda words: waiting.progress(f"{words} …"), [("Terminal", look_at_terminal)]
        )
    (show_json if flags.json else show_report)(report)
    if flags.debug:
        for trace in report.traces:
            out.trace(trace)
    return 0 if report.works else 1
