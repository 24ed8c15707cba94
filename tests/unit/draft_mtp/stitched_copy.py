"""Write a target in files and an export of its head, and check a copy of the target that has the exported head."""

import json

import torch
from safetensors.torch import load_file, save_file

from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.draft import MtpDraft
from spec_kit.drafting import write_draft

from ...mtp_targets import CONSTANT


def write_in_two_files(folder, head):
    """Write a target's tensors, of which only names matter outside the head."""
    names = sorted(head)
    files = {
        "a.safetensors": {"model.norm.weight": torch.ones(16), **{name: head[name] for name in names[::2]}},
        "b.safetensors": {"lm_head.weight": torch.ones(29, 16), **{name: head[name] for name in names[1::2]}},
    }
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def export(folder, target, tensors):
    """The target's head, each of its weights changed, as an exported folder."""
    draft = MtpDraft(MtpConfig(init_from=target.folder))
    module = draft.build(target, tensors, None)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    folder.mkdir()
    write_draft(draft, module.state_dict(), target, folder)
    return module


def assert_copied_around_the_head(target, copy, head):
    """The folder ``copy`` has the bytes of the folder ``target`` outside the head, and there the bytes of ``head``.

    All weights of ``head`` differ from the target's, and its constants are the target's."""
    trained, found = load_file(head / "model.safetensors"), set()
    for file in target.iterdir():
        old, new = file.read_bytes(), (copy / file.name).read_bytes()
        if file.suffix != ".safetensors":
            assert old == new
            continue
        length = 8 + int.from_bytes(old[:8], "little")
        assert old[:length] == new[:length]
        for name, place in json.loads(old[8:length]).items():
            first, stop = (length + offset for offset in place["data_offsets"])
            expected = old[first:stop]
            if name in trained:
                found.add(name)
                expected = trained[name].view(torch.uint8).numpy().tobytes()
                assert (expected == old[first:stop]) == name.endswith(CONSTANT), name
            assert new[first:stop] == expected, name
    assert found == trained.keys()
