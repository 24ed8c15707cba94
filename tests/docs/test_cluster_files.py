"""The files of docs/launcher-ray.md for Slurm and Kubernetes: as far as can be seen without either."""

import re
import shlex
import subprocess
from pathlib import Path

import yaml

from spec_trainer.cli import app as cli

PAGE = (Path(__file__).parents[2] / "docs" / "launcher-ray.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def takes(command: str) -> None:
    """Fail where the command line does not take the command."""
    program, *words = shlex.split(command)
    _, _, ignored = cli.app.parse_args(words, exit_on_error=False, print_error=False)
    assert (program, ignored is None) == ("spec-trainer", False)


def test_bash_takes_the_file_for_slurm_and_the_command_line_its_command():
    script = block("bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)
    takes(script.replace("\\\n", " ").strip().splitlines()[-1].partition("--overlap")[2].strip())


def test_the_manifest_is_a_ray_job_whose_groups_mount_what_they_name():
    manifest = yaml.safe_load(block("yaml"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    takes(manifest["spec"]["entrypoint"])
    cluster = manifest["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        host = group["template"]["spec"]
        mounted = {mount["name"] for container in host["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in host["volumes"]}
