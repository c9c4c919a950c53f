"""Preparation: every format gives the same tokens, however many workers, however often it was killed."""

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from chimera_train.data.dataset import TokenDataset, read_info
from chimera_train.data.errors import DataError, PrepareFailed
from chimera_train.data.prepare import PrepareOptions, main, prepare

WORDS = ["def", "return", "import", "self", "value", "None", "for", "in", "assert", "Grüße", "模型", "print", "yield"]


def texts(count=60):
    return [
        "\n".join(" ".join(WORDS[(i * j + k) % len(WORDS)] for k in range(1 + (i + j) % 9)) for j in range(1 + i % 17))
        for i in range(1, count + 1)
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts()))
    prepare(PrepareOptions(source=(str(folder),), output=folder / "out", train_tokenizer=300, num_workers=1))
    return folder / "out" / "tokenizer.json"


def jsonl(documents, key="text"):
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(documents)).encode()


def run(folder, tokenizer, *source, output="out", **options):
    options = {"num_workers": 1, **options}
    output = folder / output
    return prepare(PrepareOptions(source=source, output=output, tokenizer=tokenizer, **options)), output


def documents_of(output, tokenizer):
    """What the data set holds, decoded, each without its end-of-document token."""
    dataset = TokenDataset(output, verify_checksums=True)
    decoder = Tokenizer.from_file(str(tokenizer))
    found = []
    for number in range(len(dataset.info.shards)):
        shard = dataset._open(number)
        for i in range(shard.num_documents):
            *tokens, last = shard.document(i).tolist()
            assert last == dataset.info.eod_id
            assert dataset.info.eod_id not in tokens
            found.append(decoder.decode(tokens, skip_special_tokens=False))
    return found


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_formats(folder):
    import pyarrow
    import pyarrow.parquet
    import zstandard

    documents = texts()
    plain = jsonl(documents)
    half = len(plain) // 2
    (folder / "a.jsonl").write_bytes(plain)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(plain[:half]) + gzip.compress(plain[half:]))
    compress = zstandard.ZstdCompressor().compress
    (folder / "c.jsonl.zst").write_bytes(compress(plain[:half]) + compress(plain[half:]))
    table = pyarrow.table({"id": list(range(len(documents))), "text": documents})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=7)
    (folder / "e").mkdir()
    for i, text in enumerate(documents):
        (folder / "e" / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    (folder / "g").mkdir()
    for i, text in enumerate(documents):
        (folder / "g" / f"{i:03d}.md.gz").write_bytes(gzip.compress(text.encode()))


@pytest.mark.parametrize("shard_mb", [None, 0.002])
def test_all_formats_give_the_same_documents(tmp_path, tokenizer, shard_mb):
    write_formats(tmp_path)
    for source in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e", "e/*.txt", "g"):
        name = source.replace("/", "_").replace("*", "x")
        result, output = run(tmp_path, tokenizer, str(tmp_path / source), output=f"out_{name}", shard_mb=shard_mb)
        assert documents_of(output, tokenizer) == texts(), source
        assert result.num_documents == 60
        if shard_mb and source in ("a.jsonl", "d.parquet", "e"):
            assert result.num_shards > 4


def test_a_line_a_document(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes("﻿one\n\ntwo  \r\n   \nthree".encode())
    result, output = run(tmp_path, tokenizer, str(tmp_path / "a.txt"), document_per_line=True)
    assert documents_of(output, tokenizer) == ["one", "two  ", "three"]
    assert result.num_empty == 2


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 1000])
def test_cuts_at_any_byte_lose_no_line(tmp_path, tokenizer, size):
    lines = ["a", "", "bb", "c c", "dddddddd", "", "", "e"]
    for end in ("", "\n"):
        (tmp_path / "a.txt").write_text("\n".join(lines) + end)
        _, output = run(
            tmp_path,
            tokenizer,
            str(tmp_path / "a.txt"),
            output=f"o{len(end)}",
            document_per_line=True,
            shard_mb=size / 1e6,
        )
        assert documents_of(output, tokenizer) == [line for line in lines if line]


def test_sources_in_the_order_given_each_file_once(tmp_path, tokenizer):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    _, output = run(tmp_path, tokenizer, str(tmp_path / "c.txt"), str(tmp_path), str(tmp_path / "*.txt"))
    assert documents_of(output, tokenizer) == ["c", "a", "b"]


def test_special_tokens_in_the_text_stay_text(tmp_path, tokenizer):
    text = "before <|endoftext|> after"
    (tmp_path / "a.txt").write_text(text)
    _, output = run(tmp_path, tokenizer, str(tmp_path / "a.txt"))
    assert documents_of(output, tokenizer) == [text]


def test_long_documents_are_encoded_in_pieces(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("chimera_train.data.tokenizer._LONGEST_TEXT", 50)
    documents = ["x" * 1000, "\n".join(["some words"] * 100), "short"]
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents))
    _, output = run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"))
    assert documents_of(output, tokenizer) == documents


def test_limit(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts()))
    total = (tmp_path / "a.jsonl").stat().st_size
    result, output = run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"), limit_mb=total / 2e6)
    assert documents_of(output, tokenizer) == texts()[: result.num_documents]
    assert 20 < result.num_documents < 50


def test_held_out_documents_are_a_dataset_of_their_own(tmp_path, tokenizer):
    documents = [f"document number {i}" for i in range(500)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents))
    result, output = run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"), held_out_percent=10, shard_mb=0.005)
    train, held_out = documents_of(output, tokenizer), documents_of(output / "val", tokenizer)
    assert 25 < len(held_out) < 80
    assert sorted(train + held_out) == sorted(documents)
    assert (result.num_documents, result.num_held_out_documents) == (len(train), len(held_out))


@pytest.mark.train
def test_output_does_not_depend_on_the_number_of_workers(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts()))
    options = {"train_tokenizer": 300, "shard_mb": 0.003, "held_out_percent": 10}
    trees = []
    for workers in (1, 2, 3):
        _, output = run(tmp_path, None, str(tmp_path / "a.jsonl"), output=f"o{workers}", num_workers=workers, **options)
        trees.append(tree(output))
    assert len(trees[0]) > 10
    assert trees[0] == trees[1] == trees[2]


def command(*arguments):
    return [sys.executable, "-m", "chimera_train.data.prepare", *map(str, arguments)]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def big_corpus(folder):
    path = folder / "big.jsonl"
    path.write_bytes(jsonl(texts(60)) * 60)
    return path


def wait_for_shards(output, count, process):
    deadline = time.monotonic() + 60
    while len(list((output / "parts").glob("*.json"))) < count:
        assert process.poll() is None, "finished before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.train
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_in_the_middle_it_goes_on_and_gives_the_same_bytes(tmp_path, tokenizer, workers):
    corpus = big_corpus(tmp_path)
    shared = ("--source", corpus, "--tokenizer", tokenizer, "--shard-mb", "0.1", "--held-out", "5")
    subprocess.run(command(*shared, "--output", tmp_path / "whole"), check=True, env=environment(), capture_output=True)
    output = tmp_path / "killed"
    for count in (2, 5):
        process = subprocess.Popen(
            command(*shared, "--output", output, "--workers", workers),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_shards(output, count, process)
        process.kill()
        process.wait()
        assert not (output / "dataset.json").exists()
        time.sleep(0.3)  # the workers notice that their parent is gone
    kept = {path: path.stat().st_mtime_ns for path in output.glob("shard-*.bin") if path.with_suffix(".idx").exists()}
    (output / "shard-00099.bin.part-1").write_bytes(b"torn")
    done = subprocess.run(
        command(*shared, "--output", output, "--json"), env=environment(), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["num_documents"] > 3000
    assert tree(output) == tree(tmp_path / "whole")
    assert sum(path.stat().st_mtime_ns == then for path, then in kept.items()) >= 5  # finished shards were not redone


@pytest.mark.train
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_says_what_was_kept_and_leaves_no_process(tmp_path, tokenizer, stop):
    output = tmp_path / "out"
    shared = ("--source", big_corpus(tmp_path), "--tokenizer", tokenizer, "--shard-mb", "0.1", "--output", output)
    process = subprocess.Popen(
        command(*shared, "--workers", "2"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_shards(output, 1, process)
    os.killpg(process.pid, stop) if stop == signal.SIGINT else process.send_signal(stop)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 5
    assert "Traceback" not in errors
    assert f"prepare: stopped; kept in {output}: " in errors
    assert not list(output.glob("*.part-*"))
    deadline = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):  # noqa: PT012 - multiprocessing's resource tracker ends a moment later
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    done = subprocess.run(command(*shared), env=environment(), capture_output=True, text=True, check=True)
    assert "documents" in done.stdout


@pytest.mark.train
def test_a_full_disk_is_an_error_that_says_what_was_kept(tmp_path, tokenizer):
    """A limit on the size of files stands in for the full disk: write raises OSError in the same place."""
    corpus = tmp_path / "a.jsonl"
    corpus.write_bytes(jsonl(["short"] * 100) + jsonl(texts(60)) * 10)
    shared = ("--source", corpus, "--tokenizer", tokenizer, "--output", tmp_path / "out")
    limit = tokenizer.stat().st_size

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        command(*shared, "--workers", 1),
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=limited,
    )
    assert done.returncode == 4
    assert "shard" in done.stderr
    assert "File too large; kept in" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("*.part-*"))
    subprocess.run(command(*shared), env=environment(), check=True)
    assert read_info(tmp_path / "out").num_documents == 700


@pytest.mark.train
def test_a_worker_that_dies_is_an_error(tmp_path, tokenizer):
    output = tmp_path / "out"
    shared = ("--source", big_corpus(tmp_path), "--tokenizer", tokenizer, "--shard-mb", "0.1", "--output", output)
    process = subprocess.Popen(
        command(*shared, "--workers", "2"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_shards(output, 1, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 4
    assert "a worker process died (out of memory?); kept in" in errors


def test_the_same_command_again_does_nothing(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts()))
    first, output = run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"))
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    second, _ = run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"))
    assert (first.already_done, second.already_done) == (False, True)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_other_options_in_the_same_folder_are_refused(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts()))
    _, output = run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"))
    before = tree(output)
    with pytest.raises(DataError, match=r"with other options \(text_key was 'text', is 'id'\): nothing is overwritten"):
        run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"), text_key="id")
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(59)))
    with pytest.raises(DataError, match=r"from other inputs .*inputs_sha256"):
        run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"))
    assert tree(output) == before


def test_a_mended_input_may_go_where_no_shard_was_finished(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "broken\n')
    with pytest.raises(PrepareFailed, match=r"mended inputs and other options can go to the same --output"):
        run(tmp_path, None, str(path), train_tokenizer=300)
    path.write_bytes(jsonl(texts()))
    result, output = run(tmp_path, None, str(path), train_tokenizer=300)
    _, fresh = run(tmp_path, None, str(path), train_tokenizer=300, output="fresh")
    assert result.num_documents == 60
    assert tree(output) == tree(fresh)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_corrected_key_may_go_where_no_shard_was_finished(tmp_path, skip_bad):
    """Also with a tokenizer that was trained on nothing, and with the orphan of a kill between shard and marker."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(texts(), key="body"))
    options = {"train_tokenizer": 300, "skip_bad": skip_bad}
    wrong = (
        "every document is bad: --skip-bad left out all 60 of 1 file" if skip_bad else "no key 'text'; there are: id"
    )
    with pytest.raises(PrepareFailed, match=wrong):
        run(tmp_path, None, str(path), **options)
    if skip_bad:
        with pytest.raises(PrepareFailed, match="no key 'text'"):  # as the message says
            run(tmp_path, None, str(path), train_tokenizer=300)
    (tmp_path / "out" / "shard-00007.bin").write_bytes(b"orphan")
    _, output = run(tmp_path, None, str(path), text_key="body", **options)
    _, fresh = run(tmp_path, None, str(path), text_key="body", output="fresh", **options)
    assert tree(output) == tree(fresh)


def test_where_a_shard_is_finished_a_mended_input_is_refused_and_the_advice_works(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 11 + b"{\n" + GOOD * 7)
    output = tmp_path / "out"
    with pytest.raises(PrepareFailed, match=rf"mended inputs or other options need another --output, or {output} del"):
        run(tmp_path, tokenizer, str(path), shard_mb=5e-5)
    path.write_bytes(GOOD * 19)
    before = tree(output)
    with pytest.raises(
        DataError, match=rf"from other inputs .*choose another folder with --output; or delete {output}"
    ):
        run(tmp_path, tokenizer, str(path), shard_mb=5e-5)
    assert tree(output) == before
    assert run(tmp_path, tokenizer, str(path), shard_mb=5e-5, output="another")[0].num_documents == 19
    shutil.rmtree(output)
    assert run(tmp_path, tokenizer, str(path), shard_mb=5e-5)[0].num_documents == 19


def test_where_all_is_held_out_a_smaller_part_is_taken_by_the_same_folder(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(PrepareFailed, match=r"all of the 1 document\(s\) were held out"):
        run(tmp_path, tokenizer, str(tmp_path / "a.txt"), held_out_percent=99.99)
    assert run(tmp_path, tokenizer, str(tmp_path / "a.txt"))[0].num_documents == 1


def test_a_folder_with_other_things_is_left_alone(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match=r"is not empty \(thesis\.tex\)"):
        run(tmp_path, tokenizer, str(tmp_path / "a.txt"))
    assert tree(tmp_path / "out") == {"thesis.tex": b"precious"}


def test_two_at_a_time_in_one_folder_are_refused(tmp_path, tokenizer):
    from chimera_train.data.output import lock

    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    with lock(tmp_path / "out"), pytest.raises(DataError, match="another prepare is at work"):
        run(tmp_path, tokenizer, str(tmp_path / "a.txt"))


GOOD = b'{"text": "good"}\n'
BAD_LINES = {
    "malformed": (b'{"text": "x"\n', r"malformed JSON: .* at column"),
    "no object": (b"[1]\n", r"expected a JSON object, found list"),
    "no key": (b'{"body": "x", "id": 1}\n', r"no key 'text'; there are: body, id"),
    "null": (b'{"text": null}\n', r"'text' is null, not text"),
    "number": (b'{"text": 5}\n', r"'text' is int, not text"),
    "no utf-8": (b'{"text": "\xff"}\n', r"byte 10 of the line is no UTF-8"),
    "surrogate": (b'{"text": "\\ud800"}\n', r"the text holds half of a surrogate pair"),
}


@pytest.mark.parametrize("name", BAD_LINES)
@pytest.mark.parametrize("shard_mb", [None, 0.00005])
def test_bad_lines_name_file_and_line_or_are_counted(tmp_path, tokenizer, name, shard_mb):
    line, message = BAD_LINES[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 11 + line + GOOD * 7)
    with pytest.raises(PrepareFailed, match=rf"a\.jsonl:12: {message}.*kept in .*--skip-bad"):
        run(tmp_path, tokenizer, str(path), shard_mb=shard_mb)
    result, output = run(tmp_path, tokenizer, str(path), shard_mb=shard_mb, skip_bad=True)  # goes on in the same folder
    assert (result.num_documents, result.num_bad) == (18, 1)
    assert documents_of(output, tokenizer) == ["good"] * 18


def test_bad_text_files_and_rows(tmp_path, tokenizer):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(PrepareFailed, match=r"latin\.txt: byte 2 is no UTF-8"):
        run(tmp_path, tokenizer, str(tmp_path / "latin.txt"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet", row_group_size=1)
    with pytest.raises(PrepareFailed, match=r"a\.parquet: row 1: 'text' is null"):
        run(tmp_path, tokenizer, str(tmp_path / "a.parquet"), output="o2")
    result, _ = run(tmp_path, tokenizer, str(tmp_path / "a.parquet"), output="o2", skip_bad=True)
    assert (result.num_documents, result.num_bad) == (2, 1)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["truncated", "damaged"])
def test_damaged_archives_are_errors_even_with_skip_bad(tmp_path, tokenizer, suffix, damage):
    import zstandard

    plain = jsonl([os.urandom(40).hex() for _ in range(2000)])
    data = gzip.compress(plain) if suffix == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress(plain)
    if damage == "truncated":
        data = data[: len(data) * 2 // 3]
    else:
        data = data[:50_000] + bytes(1000) + data[51_000:]
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(data)
    with pytest.raises(PrepareFailed, match=rf"a\.jsonl\.{suffix}(:\d+)? "):
        run(tmp_path, tokenizer, str(path), skip_bad=True)


def parquet(folder):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), folder / "p.parquet")


USAGE = {
    "no source": ("--output", "o", "--train-tokenizer", "300"),
    "no output": ("--source", "a.txt", "--train-tokenizer", "300"),
    "no tokenizer": ("--source", "a.txt", "--output", "o"),
    "both": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--tokenizer", "a.txt"),
    "tokenizer gone": ("--source", "a.txt", "--output", "o", "--tokenizer", "gone.json"),
    "tokenizer broken": ("--source", "a.txt", "--output", "o", "--tokenizer", "a.txt"),
    "small vocabulary": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "100"),
    "eod ignored": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--eod-token", "x"),
    "source gone": ("--source", "gone.txt", "--output", "o", "--train-tokenizer", "300"),
    "pattern": ("--source", "*.gone", "--output", "o", "--train-tokenizer", "300"),
    "nothing known": ("--source", "odd", "--output", "o", "--train-tokenizer", "300"),
    "empty": ("--source", "empty.txt", "--output", "o", "--train-tokenizer", "300"),
    "column": ("--source", "p.parquet", "--output", "o", "--train-tokenizer", "300"),
    "no parquet": ("--source", "broken.parquet", "--output", "o", "--train-tokenizer", "300"),
    "output is a file": ("--source", "a.txt", "--output", "a.txt", "--train-tokenizer", "300"),
    "held out": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--held-out", "100"),
    "workers": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--workers", "0"),
    "shard": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--shard-mb", "0"),
    "lines ignored": ("--source", "p.parquet", "--output", "o", "--train-tokenizer", "300", "--document-per-line"),
    "key ignored": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--text-key", "body"),
    "shard nan": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--shard-mb", "nan"),
    "shard inf": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--shard-mb", "inf"),
    "shard huge": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--shard-mb", "1e30"),
    "limit nan": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--limit-mb", "nan"),
    "limit inf": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--limit-mb", "inf"),
    "limit 0": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--limit-mb", "0"),
    "held out nan": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "300", "--held-out", "nan"),
    "huge vocabulary": ("--source", "a.txt", "--output", "o", "--train-tokenizer", "99999999999999999999"),
    "check": ("--check", "gone"),
    "check and output": ("--check", "gone", "--output", "o"),
    "check and more": ("--check", "gone", "--shard-mb", "nan"),
}
SAYS = {
    "no source": "one of the arguments --source --check is required",
    "no output": "--output DIR is required",
    "no tokenizer": "give --tokenizer tokenizer.json, or --train-tokenizer",
    "both": "exclude each other",
    "tokenizer gone": "gone.json: no such file",
    "tokenizer broken": "a.txt is no tokenizer.json",
    "small vocabulary": "257 already",
    "eod ignored": "--eod-token would be ignored",
    "source gone": "gone.txt: no such file or folder",
    "pattern": "*.gone: no such file or folder, and no file matches",
    "nothing known": "odd: no file with a known suffix",
    "empty": "the corpus is empty: 1 file(s), 0 bytes",
    "column": "p.parquet has no column 'text'; it has: body",
    "no parquet": "broken.parquet is no Parquet file",
    "output is a file": "a.txt: File exists",
    "held out": "--held-out 100.0 is out of range",
    "workers": "--workers 0 is out of range",
    "shard": "--shard-mb 0.0 is out of range",
    "lines ignored": "--document-per-line would be ignored",
    "key ignored": "--text-key body would be ignored",
    "shard nan": "--shard-mb nan is out of range: MB (1e6 bytes), 1e-06 to 1e+09",
    "shard inf": "--shard-mb inf is out of range",
    "shard huge": "--shard-mb 1e+30 is out of range",
    "limit nan": "--limit-mb nan is out of range",
    "limit inf": "--limit-mb inf is out of range",
    "limit 0": "--limit-mb 0.0 is out of range",
    "held out nan": "--held-out nan is out of range",
    "huge vocabulary": "--train-tokenizer 99999999999999999999 is out of range",
    "check": "dataset.json is missing: no such folder",
    "check and output": "--check prepares nothing: --output would be ignored",
    "check and more": "--check prepares nothing: --shard-mb would be ignored",
}


@pytest.mark.parametrize("name", USAGE)
def test_bad_commands_exit_2_with_one_line_before_anything_is_written(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "x.bin").write_bytes(b"x")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    parquet(tmp_path)
    try:
        code = main(USAGE[name])
    except SystemExit as stop:  # argparse
        code = stop.code
    errors = capsys.readouterr().err
    assert code == 2
    assert SAYS[name] in errors
    assert "Traceback" not in errors
    assert len([line for line in errors.splitlines() if "error:" in line]) == 1
    assert not (tmp_path / "o").exists()


def test_a_corpus_of_blank_lines_is_empty(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("\n\n\n")
    with pytest.raises(PrepareFailed, match="the corpus is empty: 1 file"):
        run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"))


def test_eod_token_by_name(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("text")
    _, output = run(tmp_path, tokenizer, str(tmp_path / "a.txt"), eod_token="t")
    assert read_info(output).eod_id == Tokenizer.from_file(str(tokenizer)).token_to_id("t")
    with pytest.raises(DataError, match="'<eos>' is not in its vocabulary"):
        run(tmp_path, tokenizer, str(tmp_path / "a.txt"), output="o2", eod_token="<eos>")


def test_check(tmp_path, tokenizer, capsys):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts()))
    _, output = run(tmp_path, tokenizer, str(tmp_path / "a.jsonl"))
    assert main(["--check", str(output)]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    path = output / "shard-00000.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert main(["--check", str(output)]) == 2
    assert "shard-00000.bin is damaged" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.train
def test_the_standard_library_twice(tmp_path):
    """The corpus of the demonstration: large enough, held-out part included, and the same bytes each time."""
    for name, workers in (("a", "2"), ("b", "1")):
        subprocess.run(
            command("--source", "stdlib", "--output", tmp_path / name, "--workers", workers),
            env=environment(),
            check=True,
            capture_output=True,
        )
    info = read_info(tmp_path / "a")
    assert info.vocab_size == 4096
    assert info.num_tokens > 1_500_000
    assert read_info(tmp_path / "a" / "val").num_documents >= 1
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_no_torch_and_no_optional_package_is_imported():
    code = (
        "import sys, chimera_train.data.loader, chimera_train.data.prepare\n"
        "print([m for m in ('torch', 'tokenizers', 'pyarrow', 'zstandard', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
