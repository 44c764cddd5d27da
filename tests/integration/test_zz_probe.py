def test_x(place):
    import sys
    from tests.support.runs import Command

    for i in range(4):
        assert place.run(f"r{i}", "--dry-run", max_steps=50).code == 0
        config, attempt = place.folder(f"r{i}").config / "sft.toml", place.folder(f"r{i}").logs / "attempt_1"
        attempt.mkdir(parents=True)
        words = [sys.executable, "-m", "tests.integration.entries", "launch", config, attempt]
        f = Command(words, place.nursery.environment, place.root).wait(120)
        ok = "rank 1 ended first" in f.output
        print(i, f.code, ok)
        if not ok:
            print(f.output[-3500:])
            for p in sorted(attempt.iterdir()):
                if p.name.endswith("exit.json"):
                    print(p.name, p.read_text()[:900])
                if p.name in ("rank_1.log", "trainer_1.log", "agent.log"):
                    print(p.name, p.read_text()[-2500:])
            break
