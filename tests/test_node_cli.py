"""The `node` command: what it answers itself, what it hands to Node.js, and how it refuses bad input."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.handover import next_node
from node.home import Home
from node.options import JoinOptions
from protocol.errors import UsageError
from protocol.identity import Identity, load_identity
from protocol.manifest import ShareCode, format_share_code
from protocol.targets import resolve

BIN = Path(sys.executable).parent
NODE = str(BIN / "node")


def call(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([NODE, *arguments], capture_output=True, text=True, timeout=60, **options)


def path_with(*folders: Path) -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join(map(str, folders))}


def program(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "node"
    path.write_text(text)
    path.chmod(0o755)
    return path


def real_nodejs() -> Path | None:
    return next_node(os.environ.get("PATH", ""), [BIN])


needs_nodejs = pytest.mark.skipif(real_nodejs() is None, reason="no Node.js on PATH")


# --- Node.js keeps working ----------------------------------------------------------------------------------------


@needs_nodejs
def test_with_our_environment_active_nodejs_still_answers():
    environment = path_with(BIN, *map(Path, os.environ["PATH"].split(os.pathsep)))
    direct = subprocess.run([str(real_nodejs()), "--version"], capture_output=True, text=True, timeout=60)
    assert call("--version", env=environment).stdout == direct.stdout
    assert call("-e", "console.log(1 + 1)", env=environment).stdout == "2\n"
    assert call("-e", "1", env=environment).returncode == 0
    assert call("-e", "process.exit(7)", env=environment).returncode == 7
    assert call(env=environment, input="console.log('from stdin')").stdout == "from stdin\n"
    assert call("-", "a b", env=environment, input="console.log(process.argv[2])").stdout == "a b\n"
    nested = "console.log(require('child_process').execSync('node -p 40+2').toString().trim())"
    assert call("-e", nested, env=environment).stdout == "42\n"  # found by name, through us again
    if shutil.which("npm"):
        npm = subprocess.run(["npm", "--version"], env=environment, capture_output=True, text=True, timeout=60)
        assert npm.returncode == 0 and npm.stdout.strip()


def test_the_next_program_on_path_gets_arguments_stdin_and_our_pid(tmp_path):
    other = program(tmp_path / "other", '#!/bin/sh\necho "$$|$*"\ncat\nexit 3\n')
    process = subprocess.Popen(
        [NODE, "script.js", "--flag"],
        env=path_with(BIN, other.parent, Path("/bin")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate("hello", timeout=60)
    assert out == f"{process.pid}|script.js --flag\nhello"
    assert process.returncode == 3


def test_our_own_console_scripts_are_never_the_next_node(tmp_path):
    another = program(
        tmp_path / "venv2", f"#!{sys.executable}\nimport sys\nfrom node.cli import main\nsys.exit(main())\n"
    )
    link = tmp_path / "links" / "node"
    link.parent.mkdir()
    link.symlink_to(NODE)
    plain = program(tmp_path / "plain", "#!/bin/sh\necho plain\n")
    not_executable = tmp_path / "data" / "node"
    not_executable.parent.mkdir()
    not_executable.write_text("")
    (tmp_path / "folder" / "node").mkdir(parents=True)
    order = (BIN, another.parent, link.parent, not_executable.parent, tmp_path / "folder", plain.parent)
    assert next_node(os.pathsep.join(map(str, order)), [BIN]) == plain
    assert next_node(os.pathsep.join(map(str, order[:-1])), [BIN]) is None


def test_without_a_nodejs_it_says_so(tmp_path):
    done = call("--version", env=path_with(BIN, tmp_path))
    assert done.returncode == 127
    assert "no Node.js" in done.stderr and "node --help" in done.stderr


def test_a_wrapper_that_only_calls_us_back_does_not_loop(tmp_path):
    wrapper = program(tmp_path / "wrapper", f'#!/bin/sh\nexec {NODE} "$@"\n')
    done = call("-e", "1", env=path_with(BIN, wrapper.parent, Path("/bin")))
    assert done.returncode == 127


# --- our own commands ---------------------------------------------------------------------------------------------


def test_help_answers_without_heavy_imports():
    for arguments in (["--help"], ["join", "--help"], ["status", "--help"]):
        script = (
            "import sys, runpy\n"
            f"sys.argv = ['node', *{arguments!r}]\n"
            "try:\n    runpy.run_module('node.cli', run_name='__main__')\n"
            "except SystemExit as exc:\n    assert not exc.code\n"
            "heavy = {'torch', 'transformers', 'libp2p', 'trio', 'aiohttp', 'numpy'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "example" in done.stdout


def test_id_makes_a_private_key_once(tmp_path):
    first = call("id", "--home", str(tmp_path / "h"))
    assert first.returncode == 0 and first.stdout.startswith("12D3Koo")
    again = call("id", "--home", str(tmp_path / "h"), "--json")
    shown = json.loads(again.stdout)
    assert shown["peer_id"] == first.stdout.strip()
    path = tmp_path / "h" / "identity.pem"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_identity(path).public.hex() == shown["key"]
    path.chmod(0o644)
    loose = call("id", "--home", str(tmp_path / "h"))
    assert loose.returncode == 2 and "chmod 600" in loose.stderr


def test_status_of_a_home_without_a_node_says_how_to_start_one(tmp_path):
    done = call("status", "--home", str(tmp_path))
    assert done.returncode == 2 and "node join" in done.stderr


def test_doctor_names_what_to_fix(tmp_path):
    good = call("doctor", "--home", str(tmp_path / "h"), "--json")
    findings = {f["check"]: f for f in json.loads(good.stdout)["findings"]}
    assert findings["python"]["holds"] and findings["packages"]["holds"] and findings["keys"]["holds"]
    call("id", "--home", str(tmp_path / "h"))
    (tmp_path / "h" / "identity.pem").chmod(0o640)
    bad = call("doctor", "--home", str(tmp_path / "h"))
    assert bad.returncode == 1 and "chmod 600" in bad.stdout


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("no-such-file", "ask the run's operator"),
        ("hw1abcdefgh", "checksum"),
        ("hw1!!!!", "character"),
        ("/ip4/127.0.0.1/tcp/4001", "/p2p/"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/12D3Koo", "/p2p/"),
    ],
)
def test_a_run_that_cannot_be_meant_is_refused_in_words(tmp_path, run, words):
    done = call("join", "--role", "inference", "--run", run, "--home", str(tmp_path / "h"))
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize(
    ("role", "options", "words"),
    [
        ("relay", ["--listen", "999:1"], "give an IP address and a port"),
        ("relay", ["--listen", "127.0.0.1:70000"], "between 0 and 65535"),
        ("relay", ["--listen", "192.0.2.1:0"], "does not have that address"),
        ("relay", ["--listen", "BUSY"], "another program listens there"),
        ("inference", ["--listen", "127.0.0.1:1"], "for the role relay only"),
        ("inference", ["--engine-socket", "/nonexist"], "start the engine first"),
        ("inference", ["--engine-socket", "/nonexist/x", "--engine-later"], "nothing is there"),
        ("inference", ["--engine-socket", "/"], "no socket"),
        ("inference", ["--engine-socket", "/" + "x" * 200], "at most 107 bytes"),
        ("inference", ["--engine-later"], "--engine-socket PATH"),
        ("validator", ["--engine-socket", "/nonexist"], "for the role inference only"),
        ("inference", ["--threads", "0"], "between 1 and"),
        ("validator", ["--threads", "999999"], "between 1 and"),
        ("validator", ["--name", "é" * 33], "longer than 64 bytes"),
        ("validator", ["--name", "a\x1b[2J"], "can't be shown"),
        ("validator", ["--log", "/"], "/"),
    ],
)
def test_an_option_that_cannot_hold_here_is_refused_before_the_network(tmp_path, role, options, words):
    code = format_share_code(ShareCode(b"r" * 32, Identity.generate().public, ("/ip4/127.0.0.1/tcp/9",)))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        options = [f"127.0.0.1:{busy.getsockname()[1]}" if word == "BUSY" else word for word in options]
        done = call("join", "--role", role, "--run", code, "--home", str(tmp_path / "h"), *options)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "h").exists()


def test_a_node_says_how_it_is_started_again(tmp_path):
    options = JoinOptions(
        role="inference", run="r", home=tmp_path, engine_socket=tmp_path / "e.sock", engine_later=True, threads=2
    )
    assert options.command.endswith(f"--engine-socket {tmp_path}/e.sock --engine-later --threads 2")


def test_a_run_is_found_by_code_file_or_address(tmp_path):
    transport = Identity.generate()
    bare = "/ip4/127.0.0.1/tcp/4001"
    full = f"{bare}/p2p/{transport.peer_id}"
    code = format_share_code(ShareCode(b"r" * 32, transport.public, (bare, full)))
    assert resolve(code).run == b"r" * 32
    assert resolve(code).addresses == (full, full)
    file = tmp_path / "join.hw"
    file.write_text(code + "\n")
    assert resolve(str(file)) == resolve(code)
    assert resolve(full).run is None and resolve(full).addresses == (full,)
    with pytest.raises(UsageError):
        resolve(str(tmp_path))


def test_one_home_is_one_process(tmp_path):
    first, second = Home(tmp_path / "h"), Home(tmp_path / "h")
    first.lock()
    with pytest.raises(UsageError, match=str(os.getpid())):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()
