"""The command line, called in this process."""

from dtkernels.cli import main


def run(capsys, *argv) -> str:
    """What a command that succeeds prints; nothing goes to stderr."""
    assert main([str(a) for a in argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys, *argv) -> str:
    """The one line with which a command is refused; nothing goes to stdout."""
    assert main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1
    return err.rstrip("\n")
