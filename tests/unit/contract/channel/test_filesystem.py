from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from contract.channel.filesystem import FilesystemReceiver, FilesystemSender
from contract.errors import ChannelError


def frames_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("session_*/*")}


def test_acknowledged_frames_are_deleted_and_the_others_are_kept(tmp_path: Path) -> None:
    async def main() -> None:
        sender, receiver = FilesystemSender(tmp_path), FilesystemReceiver(tmp_path, "trainer")
        for sequence in (7, 8, 9):
            await sender.send(sequence, b"content")
        assert frames_in(tmp_path) == {"frame_7", "frame_8", "frame_9"}
        assert await asyncio.to_thread(receiver.receive, 7, 10.0) == b"content"
        receiver.acknowledge(8)
        while await sender.acknowledged() < 8:
            await asyncio.sleep(0.01)
        assert frames_in(tmp_path) == {"frame_9"}
        await sender.close()
        assert frames_in(tmp_path) == set()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_frame_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    async def main() -> None:
        sender, receiver = FilesystemSender(tmp_path), FilesystemReceiver(tmp_path, "trainer")
        (session,) = tmp_path.glob("session_*")
        (session / "frame_1.partial").write_bytes(b"as far as a writer came that was killed")
        assert await asyncio.to_thread(receiver.receive, 1, 0.3) is None
        await sender.send(1, b"whole")
        assert await asyncio.to_thread(receiver.receive, 1, 10.0) == b"whole"
        await sender.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_folder_that_cannot_be_made_says_where_and_what_to_do(tmp_path: Path) -> None:
    occupied = tmp_path / "channel"
    occupied.write_text("a file where the folder should be")

    async def main() -> None:
        FilesystemSender(occupied)

    with pytest.raises(ChannelError, match="cannot be written: File exists; free space or mend the rights"):
        asyncio.run(main())
    with pytest.raises(ChannelError, match=r"channel.type = 'filesystem', but .*channel cannot be written"):
        FilesystemReceiver(occupied, "trainer")


def test_a_folder_that_is_lost_while_running_is_an_error_of_the_next_send(tmp_path: Path) -> None:
    async def main() -> None:
        sender = FilesystemSender(tmp_path)
        (session,) = tmp_path.glob("session_*")
        session.rmdir()
        with pytest.raises(ChannelError, match=r"set channel\.type = 'zmq'"):
            await sender.send(1, b"content")
        await sender.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_damaged_note_of_the_receiver_reaches_the_sender(tmp_path: Path) -> None:
    async def main() -> None:
        sender = FilesystemSender(tmp_path)
        (tmp_path / "receiver").write_text("{")
        with pytest.raises(ChannelError, match="receiver is damaged"):
            while True:
                await sender.acknowledged()
                await asyncio.sleep(0.01)
        await sender.close()

    asyncio.run(asyncio.wait_for(main(), 20))
