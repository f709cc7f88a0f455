"""A real Slurm on one machine, from Debian's packages, all of it in one folder.

    python tests/slurm/cluster.py up FOLDER       start it (about 5 s)
    eval "$(python tests/slurm/cluster.py env FOLDER)"
    python tests/slurm/cluster.py down FOLDER     stop it and remove the folder

munged, MariaDB, slurmdbd, slurmctld and one slurmd a node run with a key, sockets, a database
and ports of their own; clients find them by SLURM_CONF. Nothing of a Slurm, munge or MariaDB
that is installed for the machine is read or written. Partitions:

    cpu       nodes cpu1, cpu2
    gpu       node gpu1 with two pretend A100s (their device files are /dev/zero and /dev/null)
    gpu-low   the same node; jobs in `gpu` preempt jobs here, which get GRACE_S to end
"""

import argparse
import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CPU_NODES = ("cpu1", "cpu2")
GPU_NODES = ("gpu1",)
NODES = (*CPU_NODES, *GPU_NODES)
DAEMONS = ("munged", "mariadb", "slurmdbd", "slurmctld", *NODES)

ACCOUNT = "lab"
QOS = ("normal", "long")
CPUS_PER_NODE = 2
GRACE_S = 20
KILL_WAIT_S = 10
NODE_TIMEOUT_S = 15

PROGRAMS = {
    "munge": ("munged", "mungekey"),
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd",),
    "slurm-client": ("sbatch", "squeue", "sinfo", "scontrol"),
    "slurmdbd": ("slurmdbd",),
    "mariadb-server": ("mariadbd", "mariadb-install-db"),
}
# Daemons lie where an ordinary user's PATH does not look.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
SOCKET_PATH_LIMIT = 100
OWNER = "PHAROS_SLURM_DAEMON"


class ClusterError(Exception):
    """What keeps the cluster from starting or answering, in one line."""


def missing_packages() -> list[str]:
    """The Debian packages that a cluster needs and this machine lacks."""
    return [
        package
        for package, programs in PROGRAMS.items()
        if any(shutil.which(program, path=PATH) is None for program in programs)
    ]


def answering_slurm() -> str | None:
    """Where a Slurm that this environment already reaches runs; None if there is none."""
    if shutil.which("scontrol", path=PATH) is None:
        return None
    try:
        ping = subprocess.run(
            ["scontrol", "ping"],
            env={**os.environ, "PATH": PATH},
            capture_output=True,
            text=True,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return None
    up = [line for line in ping.stdout.splitlines() if line.endswith("is UP")]
    return up[0] if up else None


class Cluster:
    """A private Slurm in ``folder``.

    Parameters
    ----------
    folder
        Where everything goes; made, and must be empty or a cluster's own. No white space, and
        short enough for a socket's path (about 80 characters).
    port_base
        slurmctld listens on it, the other daemons on the ports that follow; None takes a free
        range between 21000 and 32000.
    use_existing
        Start nothing: speak to the Slurm that this environment already reaches.
    """

    def __init__(
        self, folder: Path | str, port_base: int | None = None, use_existing: bool = False
    ) -> None:
        self.folder = Path(folder).absolute()
        self.state_file = self.folder / "cluster.json"
        self.conf = self.folder / "etc" / "slurm.conf"
        self.port_base = port_base
        self.existing = use_existing
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def load(cls, folder: Path | str) -> "Cluster":
        """The cluster that an ``up`` made in ``folder``."""
        cluster = cls(folder)
        try:
            state = json.loads(cluster.state_file.read_text())
        except (OSError, ValueError):
            raise ClusterError(f"{folder}: no cluster was started there") from None
        cluster.port_base = state["port_base"]
        cluster.existing = state["existing"]
        return cluster

    # --- start and stop ---

    def start(self) -> None:
        """Bring everything up; every node is idle when this returns.

        Raises
        ------
        ClusterError
            A package is missing, a Slurm answers already, the folder or a port cannot be used,
            or a daemon does not come up (its log is named).
        """
        if missing := missing_packages():
            raise ClusterError(f"not installed: {' '.join(missing)} (apt-get install them)")
        present = answering_slurm()
        if self.existing:
            if present is None:
                raise ClusterError("no Slurm answers `scontrol ping`: there is none to use")
            self._claim_folder()
            self._save_state()
            return
        if present is not None:
            raise ClusterError(
                f"a Slurm answers already ({present}): name it with --use-existing, "
                "or unset SLURM_CONF to start a private one beside it"
            )
        self._claim_folder()
        self._claim_ports()
        self._save_state()
        try:
            self._write_configuration()
            self._make_database()
            for name in DAEMONS:
                self._launch(name)
                self._wait_ready(name)
                if name == "slurmdbd":
                    self._make_accounts()
            self.wait_nodes("idle")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every daemon, step and job of this cluster; the folder with its logs stays."""
        if self.existing:
            return
        if self._pid("slurmctld") is not None:
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", "--full", "--user", self.user, check=False, timeout=20)
                self._until(lambda: not self._stepds(), 5)
        for name in reversed(DAEMONS):
            self._end(name, signal.SIGTERM)
        _kill(self._stepds() + self._job_processes())

    def remove(self) -> None:
        """Stop, and remove the folder."""
        self.stop()
        shutil.rmtree(self.folder)

    def start_daemon(self, name: str) -> None:
        """Start one of DAEMONS again and wait until it answers."""
        self._check_daemon(name)
        if self._pid(name) is None:
            self._launch(name)
        self._wait_ready(name)
        if name in NODES:
            self.wait_nodes("idle", "mixed", "allocated", nodes=[name])

    def stop_daemon(self, name: str, kill: bool = False) -> None:
        """Stop one of DAEMONS (``kill``: with SIGKILL); its jobs go on, as Slurm's do."""
        self._check_daemon(name)
        self._end(name, signal.SIGKILL if kill else signal.SIGTERM)

    def fail_node(self, name: str) -> None:
        """A node that loses power: its slurmd and every process of its jobs die at once."""
        self._check_daemon(name)
        self._end(name, signal.SIGKILL)
        _kill(self._stepds(name) + self._job_processes(name))

    def stop_with(self) -> subprocess.Popen[bytes]:
        """A process that stops the cluster when its standard input ends: with us, even killed."""
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "stop-at-end", str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    # --- clients ---

    def environment(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {} if self.existing else {"SLURM_CONF": str(self.conf)}

    def run(
        self, *command: str, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a client command against this cluster."""
        done = subprocess.run(
            command,
            env={**os.environ, "PATH": PATH, **self.environment()},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
        return done

    def sbatch(self, script: str, *options: str) -> str:
        """Submit a shell script; returns its job id."""
        return self.run("sbatch", "--parsable", *options, "--wrap", script).stdout.strip()

    def sacct(self, *options: str, fields: str = "") -> list[dict[str, str]]:
        """Rows of ``sacct`` (jobs without their steps), a dict each.

        ``fields`` is a comma-separated list; by default those that tests mostly ask for. Waits
        until the records are whole: slurmctld sends them in parts, the partition last.
        """
        fields = fields or (
            "JobID,JobName,Partition,Account,QOS,State,ExitCode,AllocCPUS,ReqMem,ReqTRES,"
            "AllocTRES,Timelimit,Elapsed,NodeList,Comment,Start,End,Submit"
        )

        def ask(fields: str) -> list[str]:
            command = ("sacct", "-X", "-P", "-n", "-S", "now-2days", "-o", fields, *options)
            return self.run(*command).stdout.splitlines()

        self._until(lambda: all(ask("Partition")), 20)
        names = fields.split(",")
        return [dict(zip(names, line.split("|"), strict=True)) for line in ask(fields)]

    def job_state(self, job_id: str) -> str:
        """State of a job as slurmctld says (``squeue``, ended jobs included)."""
        done = self.run("squeue", "-h", "-t", "all", "-o", "%T", "-j", job_id)
        return done.stdout.strip()

    def wait_job(self, job_id: str, *states: str, timeout: float = 60) -> str:
        """Wait until a job is in one of ``states`` (default: ended); returns the state."""
        running = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "")

        def reached() -> bool:
            state = self.job_state(job_id)
            return state in states if states else state not in running

        if not self._until(reached, timeout):
            raise ClusterError(
                f"job {job_id} is {self.job_state(job_id)} after {timeout:.0f} s, "
                f"not {' or '.join(states) or 'ended'}"
            )
        return self.job_state(job_id)

    def node_states(self) -> dict[str, str]:
        """State of every node, as ``sinfo`` writes it (``idle``, ``down*``, ...)."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return dict(line.split() for line in lines)

    def wait_nodes(
        self, *states: str, nodes: tuple[str, ...] | list[str] = NODES, timeout: float = 45
    ) -> None:
        """Wait until every one of ``nodes`` is in one of ``states``."""

        def reached() -> bool:
            try:
                now = self.node_states()
            except (ClusterError, subprocess.TimeoutExpired):
                return False
            return all(now.get(node, "") in states for node in nodes)

        if not self._until(reached, timeout):
            raise ClusterError(
                f"nodes are {self.node_states()} after {timeout:.0f} s, not {' or '.join(states)}"
            )

    # --- what start() does, in order ---

    def _claim_folder(self) -> None:
        if any(character.isspace() for character in str(self.folder)):
            raise ClusterError(
                f"{self.folder}: a path with white space, which slurm.conf cannot hold: "
                "name another folder"
            )
        if len(str(self.folder / "mariadb.sock")) > SOCKET_PATH_LIMIT:
            raise ClusterError(f"{self.folder}: too long a path for a socket: name a shorter one")
        if self.state_file.exists():
            if any(self._pid(name) is not None for name in DAEMONS):
                raise ClusterError(f"{self.folder}: a cluster is up there already; `down` ends it")
            shutil.rmtree(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise ClusterError(
                    f"{self.folder}: not empty, and not a cluster's: name a new folder"
                )
        except OSError as error:
            raise ClusterError(f"{self.folder}: {error.strerror}") from None

    def _claim_ports(self) -> None:
        if self.port_base is not None:
            for port in self._ports(self.port_base):
                if not _is_free(port):
                    raise ClusterError(
                        f"port {port} is in use: name another --port-base "
                        f"({len(self._ports(0))} ports from there on are taken)"
                    )
            return
        bases = list(range(21000, 32000, 100))
        first = os.getpid() % len(bases)  # two that start at once do not look at the same one
        for base in bases[first:] + bases[:first]:
            if all(_is_free(port) for port in self._ports(base)):
                self.port_base = base
                return
        raise ClusterError("no free range of ports from 21000 to 32000: name a --port-base")

    def _ports(self, base: int) -> range:
        return range(base, base + 2 + len(NODES))

    def _save_state(self) -> None:
        self.state_file.write_text(
            json.dumps({"port_base": self.port_base, "existing": self.existing}) + "\n"
        )

    def _write_configuration(self) -> None:
        for name in ("etc", "log", "pid", "state", "spool", "munge", "tmp"):
            (self.folder / name).mkdir()
        for node in NODES:
            (self.folder / "spool" / node).mkdir()
        host = socket.gethostname().split(".")[0]
        base = self.port_base or 0
        munge = f"socket={self.folder}/munge/socket"
        nodes = "".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={base + 2 + place} "
            f"CPUs={CPUS_PER_NODE} RealMemory=128000 "
            f"{'Gres=gpu:a100:2 ' if node in GPU_NODES else ''}State=UNKNOWN\n"
            for place, node in enumerate(NODES)
        )
        # linuxproc and linux need no cgroups, so that this runs in a container; the memory of a
        # job is then sampled, and a job over its limit is killed at the next sample.
        self.conf.write_text(
            f"""\
ClusterName=pharos
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={base}
SlurmUser={self.user}
SlurmdUser={self.user}
AuthType=auth/munge
AuthInfo={munge}
MpiDefault=none
MailProg=/bin/true
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/pid/slurmctld.own
SlurmdPidFile={self.folder}/pid/%n.own
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/%n.log

ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
JobAcctGatherParams=OverMemoryKill

ReturnToService=2
SlurmdTimeout={NODE_TIMEOUT_S}
KillWait={KILL_WAIT_S}
OverTimeLimit=0
MinJobAge=300
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={base + 1}
AccountingStoragePass={self.folder}/munge/socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu,gres/gpu:a100
AccountingStoreFlags=job_comment

{nodes}
PartitionName=DEFAULT State=UP DefaultTime=10 MaxTime=2-00:00:00 DefMemPerCPU=500 PreemptMode=OFF
PartitionName=cpu Nodes={",".join(CPU_NODES)} Default=YES PriorityTier=10
PartitionName=gpu Nodes={",".join(GPU_NODES)} PriorityTier=10
PartitionName=gpu-low Nodes={",".join(GPU_NODES)} PriorityTier=1 PreemptMode=CANCEL \
GraceTime={GRACE_S}
"""
        )
        (self.folder / "etc" / "gres.conf").write_text(
            "AutoDetect=off\n"
            + "".join(
                f"NodeName={node} Name=gpu Type=a100 File={file}\n"
                for node in GPU_NODES
                for file in ("/dev/zero", "/dev/null")
            )
        )
        dbd = self.folder / "etc" / "slurmdbd.conf"
        dbd.write_text(
            f"""\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={base + 1}
SlurmUser={self.user}
AuthType=auth/munge
AuthInfo={munge}
LogFile={self.folder}/log/slurmdbd.log
PidFile={self.folder}/pid/slurmdbd.own
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageLoc=slurm_acct_db
StorageUser=slurm
"""
        )
        dbd.chmod(0o600)
        self._tool("mungekey", "--create", f"--keyfile={self.folder}/munge/key")

    def _make_database(self) -> None:
        self._tool(
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={self.folder}/database",
            f"--user={self.user}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
        )

    def _tool(self, *command: str) -> None:
        # mariadb-install-db has temporary files whose names another one's may have.
        env = {**os.environ, "PATH": PATH, "TMPDIR": f"{self.folder}/tmp"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())[-300:]
            raise ClusterError(f"{command[0]} failed: {said}")

    def _make_accounts(self) -> None:
        add = ("sacctmgr", "-i", "add")
        self.run(*add, "cluster", "pharos")
        for name in QOS[1:]:
            self.run(*add, "qos", name)
        self.run(*add, "account", ACCOUNT, "Organization=pharos", "Description=tests")
        qos = f"QOS={','.join(QOS)}"
        self.run(*add, "user", self.user, f"Account={ACCOUNT}", qos, check=False)
        self.run(
            *("sacctmgr", "-i", "modify", "user", self.user, "where", f"account={ACCOUNT}"),
            *("set", f"DefaultAccount={ACCOUNT}", qos, f"DefaultQOS={QOS[0]}"),
        )

    # --- daemons ---

    def _command(self, name: str) -> list[str]:
        at = self.folder
        if name == "munged":
            return [
                *("munged", "--foreground", "--force", f"--key-file={at}/munge/key"),
                *(f"--socket={at}/munge/socket", f"--pid-file={at}/munge/pid"),
                *(f"--log-file={at}/log/munged.log", f"--seed-file={at}/munge/seed"),
            ]
        if name == "mariadb":
            return [
                *("mariadbd", "--no-defaults", f"--datadir={at}/database", f"--tmpdir={at}/tmp"),
                *(f"--socket={at}/mariadb.sock", f"--pid-file={at}/pid/mariadb.own"),
                *("--skip-networking", f"--user={self.user}", "--innodb-lock-wait-timeout=900"),
                *("--innodb-buffer-pool-size=64M", f"--init-file={at}/etc/database.sql"),
            ]
        if name in NODES:
            return ["slurmd", "-D", "-N", name, "-f", str(self.conf)]
        return [name, "-D", *(["-f", str(self.conf)] if name == "slurmctld" else [])]

    def _launch(self, name: str) -> None:
        if name == "mariadb":
            (self.folder / "etc" / "database.sql").write_text(
                "CREATE USER IF NOT EXISTS slurm@localhost;\n"
                "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
                "GRANT ALL ON slurm_acct_db.* TO slurm@localhost;\n"
            )
        # What a job finds in its environment is what its submitter had, not what we have.
        env = {
            **{key: os.environ[key] for key in ("HOME", "LANG", "TZ") if key in os.environ},
            **self.environment(),
            "PATH": PATH,
            # libmariadb has no other way of being told a socket by slurmdbd.
            "MYSQL_UNIX_PORT": f"{self.folder}/mariadb.sock",
            OWNER: f"{self.folder}:{name}",
        }
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                self._command(name),
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._children[name] = process
        (self.folder / "pid" / name).write_text(str(process.pid))

    def _wait_ready(self, name: str) -> None:
        base = self.port_base or 0
        answers = {
            "munged": lambda: _accepts_socket(self.folder / "munge" / "socket"),
            "mariadb": lambda: _accepts_socket(self.folder / "mariadb.sock"),
            "slurmdbd": lambda: not _is_free(base + 1),
            "slurmctld": lambda: not _is_free(base),
        }
        ready = answers.get(name, lambda: not _is_free(base + 2 + NODES.index(name)))
        if not self._until(lambda: self._pid(name) is None or ready(), 40):
            raise ClusterError(f"{name} does not answer after 40 s (log: {self._log(name)})")
        if self._pid(name) is None:
            raise ClusterError(f"{name} ended at once (log: {self._log(name)})")

    def _log(self, name: str) -> Path:
        log = self.folder / "log" / f"{name}.log"
        return log if log.exists() and log.stat().st_size else log.with_suffix(".out")

    def _check_daemon(self, name: str) -> None:
        if self.existing:
            raise ClusterError("this Slurm was not started here: its daemons are left alone")
        if name not in DAEMONS:
            raise ClusterError(f"no daemon {name!r}: {', '.join(DAEMONS)}")

    def _pid(self, name: str) -> int | None:
        """Process id of a running daemon of this cluster, else None."""
        if name in self._children:  # asked as a parent, which also reaps one that has ended
            child = self._children[name]
            return child.pid if child.poll() is None else None
        try:
            pid = int((self.folder / "pid" / name).read_text())
        except (OSError, ValueError):
            return None
        mine = f"{self.folder}:{name}"
        return pid if _environment_of(pid).get(OWNER) == mine else None

    def _end(self, name: str, sign: signal.Signals) -> None:
        pid = self._pid(name)
        if pid is None:
            return
        os.kill(pid, sign)
        if not self._until(lambda: self._pid(name) is None, 20):
            os.kill(pid, signal.SIGKILL)
            self._until(lambda: self._pid(name) is None, 5)

    def _stepds(self, node: str | None = None) -> list[int]:
        """slurmstepd processes of a node, or of all: they carry their slurmd's environment."""
        owners = {f"{self.folder}:{name}" for name in ([node] if node else NODES)}
        slurmd = {self._pid(name) for name in NODES}
        return [pid for pid, env in _processes() if env.get(OWNER) in owners and pid not in slurmd]

    def _job_processes(self, node: str | None = None) -> list[int]:
        """Processes that jobs of this cluster started."""
        return [
            pid
            for pid, env in _processes()
            if env.get("SLURM_CONF") == str(self.conf)
            and "SLURM_JOB_ID" in env
            and pid != os.getpid()
            and (node is None or env.get("SLURMD_NODENAME") == node)
        ]

    @staticmethod
    def _until(reached: Callable[[], bool], timeout: float) -> bool:
        """Ask until true, for at most ``timeout`` seconds; whether it became true."""
        end = time.monotonic() + timeout
        pause = 0.05
        while not reached():
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)
        return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _accepts_socket(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _environment_of(pid: int) -> dict[str, str]:
    """A process's environment as it was started; empty for one that is gone or a zombie."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def _processes() -> Iterator[tuple[int, dict[str, str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name), _environment_of(int(entry.name))


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A private Slurm on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster in FOLDER")
    down = commands.add_parser("down", help="stop the cluster in FOLDER and remove FOLDER")
    env = commands.add_parser("env", help="print the export lines that clients need")
    end = commands.add_parser("stop-at-end", help="wait for the end of the input, then stop")
    for command in (up, down, env, end):
        command.add_argument("folder", metavar="FOLDER")
    up.add_argument("--port-base", type=int, metavar="N", help="first of the ports (default: free)")
    up.add_argument(
        "--use-existing", action="store_true", help="use the Slurm that answers already"
    )
    given = parser.parse_args(arguments)
    try:
        if given.command == "up":
            started = time.monotonic()
            cluster = Cluster(given.folder, given.port_base, given.use_existing)
            cluster.start()
            print(f"up in {time.monotonic() - started:.0f} s: {cluster.node_states()}")
        elif given.command == "down":
            Cluster.load(given.folder).remove()
        elif given.command == "stop-at-end":
            sys.stdin.read()
            Cluster.load(given.folder).stop()
        else:
            for name, value in Cluster.load(given.folder).environment().items():
                print(f"export {name}={value}")
    except (ClusterError, subprocess.TimeoutExpired) as error:
        print(f"cluster: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
