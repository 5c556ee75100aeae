/* SPDX-License-Identifier: MIT */
/* The fault queue: what its rules hit, what they do, and what is no rule. */
#include "queue_kit.h"

static _Atomic uint64_t injected;

/* 100 reads of 4000 bytes under a rule. */
static void run_rule(const char *rule, unsigned int attempt)
{
	if (!object)
		open_file(make_file("file", 400000), PEN_READ, 0);
	injected = 0;
	memset(memory, 0, KIT_ROOM);
	CHECK_EQ(start_queue(&queue_sync_ops, 16, rule, &injected), 0);
	prepare(100, 4000, false, false);
	for (int i = 0; i < 100; i++)
		requests[i].attempt = attempt;
	run_requests(100);
	queue_fini(&queue);
}

TEST(one_request_fails_once)
{
	run_rule("fail:3", 0);
	CHECK_EQ(failed, 1);
	CHECK_EQ(requests[2].result, -EIO);
	CHECK_EQ(injected, 1);
	CHECK_EQ(full, 99);
	run_rule("fail:3", 1);
	CHECK_EQ(full, 100);
	run_rule("fail:101", 0);
	CHECK_EQ(full, 100);
}

TEST(from_one_on_all_fail_and_go_on_failing)
{
	run_rule("fail:91+:ENOSPC", 0);
	CHECK_EQ(failed, 10);
	CHECK_EQ(requests[89].result, 0);
	CHECK_EQ(requests[90].result, -ENOSPC);
	run_rule("fail:91+:ENOSPC", 4);
	CHECK_EQ(failed, 10);
}

TEST(a_star_hits_all_every_time)
{
	run_rule("fail:*:EREMOTEIO", 2);
	CHECK_EQ(failed, 100);
	CHECK_EQ(injected, 100);
	CHECK_EQ(requests[50].result, -EREMOTEIO);
}

TEST(a_share_hits_about_that_many_and_always_the_same)
{
	bool hit[100];

	run_rule("fail:20%", 0);
	CHECK(failed >= 8 && failed <= 35);
	for (int i = 0; i < 100; i++)
		hit[i] = requests[i].result != 0;
	run_rule("fail:20%", 0);
	for (int i = 0; i < 100; i++)
		CHECK_EQ(hit[i], requests[i].result != 0);
	/* Not on retries, else a large share would never get through. */
	run_rule("fail:100%", 1);
	CHECK_EQ(full, 100);
	run_rule("fail:100%", 0);
	CHECK_EQ(failed, 100);
	run_rule("fail:0.0001%", 0);
	CHECK_EQ(full, 100);
}

TEST(short_moves_half_or_what_it_is_told)
{
	run_rule("short:7", 0);
	CHECK_EQ(shorts, 1);
	CHECK_EQ(requests[6].done, 2000);
	run_rule("short:7:100", 0);
	CHECK_EQ(requests[6].done, 100);
	run_rule("short:7:1M", 0);
	CHECK_EQ(full, 100);
	CHECK_EQ(pattern_check(memory, 400000, 0), 400000);
}

TEST_ALONE(delay_brings_it_home_late)
{
	uint64_t begin = os_now();

	run_rule("delay:5:50ms", 0);
	CHECK(os_now() - begin >= 50000000 && os_now() - begin < 500000000);
	CHECK_EQ(full, 100);
	CHECK(requests[4].ended_ns - requests[4].started_ns >= 50000000);
	CHECK(requests[3].ended_ns - requests[3].started_ns < 50000000);
	/* All at once are late together, not one after the other. */
	begin = os_now();
	run_rule("delay:*:20ms", 0);
	CHECK(os_now() - begin < 600000000);
}

TEST(corrupt_flips_one_bit_of_what_was_read)
{
	run_rule("corrupt:7", 0);
	CHECK_EQ(full, 100);
	CHECK_EQ(pattern_check(memory, 400000, 0), 6 * 4000 + 2000);
	memory[6 * 4000 + 2000] ^= 1;
	CHECK_EQ(pattern_check(memory, 400000, 0), 400000);
}

TEST(corrupt_writes_wrong_and_leaves_the_memory_right)
{
	const char *path = in_scratch("new");

	open_file(path, PEN_WRITE, 40000);
	pattern_fill(memory, 40000, 0);
	CHECK_EQ(start_queue(&queue_sync_ops, 4, "corrupt:3,fail:5", &injected), 0);
	prepare(10, 4000, true, false);
	run_requests(10);
	CHECK(failed == 1 && full == 9);
	CHECK_EQ(pattern_check(memory, 40000, 0), 40000);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	CHECK_EQ(good_bytes(path), 10000);
	end_queue();
}

TEST(rules_add_up)
{
	run_rule("fail:1,fail:2:EINTR,short:3,corrupt:4,delay:5:1ms", 0);
	CHECK_EQ(injected, 5);
	CHECK_EQ(failed, 2);
	CHECK_EQ(requests[1].result, -EINTR);
	CHECK_EQ(shorts, 1);
}

TEST(rules_are_understood)
{
	static const char *const good[] = {
		"fail:1", "fail:1+", "fail:*", "fail:0.5%", "fail:100%", "fail:3:ENOSPC",
		"short:2", "short:2:512", "short:*:4K", "delay:*", "delay:1:5ms", "corrupt:9",
		"fail:1,fail:2,fail:3,fail:4,fail:5,fail:6,fail:7,fail:8",
	};

	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		CHECK_EQ(queue_inject_check(good[i], &err), 0);
}

TEST(what_is_no_rule_is_refused)
{
	static const char *const bad[] = {
		"", "fail", "fail:", "fail:0", "fail:x", "fail:-1", "fail:1++", "fail:+", "fail:%",
		"fail:0%", "fail:101%", "fail:nan%", "fail:1:EWHAT", "fail:1:EIO:more", "fail:1:",
		"explode:1", "short:1:x", "delay:1:x", "corrupt:1:5", "fail:1,", ",fail:1",
		"FAIL:1", "fail:1;fail:2",
		"fail:1,fail:2,fail:3,fail:4,fail:5,fail:6,fail:7,fail:8,fail:9",
	};
	char large[400];

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		int rc = queue_inject_check(bad[i], &err);

		if (rc != -EINVAL)
			fprintf(stderr, "\"%s\"\n", bad[i]);
		CHECK_EQ(rc, -EINVAL);
		CHECK(strstr(err.hint, "KIND:WHICH") && strstr(err.message, "rule"));
	}
	CHECK_EQ(queue_inject_check("fail:1,short:2,bad:3", &err), -EINVAL);
	CHECK(strstr(err.message, "rule 3"));
	memset(large, '1', sizeof(large));
	memcpy(large, "fail:", 5);
	large[399] = 0;
	CHECK_EQ(queue_inject_check(large, &err), -EINVAL);
}

TEST(a_share_is_a_plain_number)
{
	CHECK_EQ(queue_inject_check("fail: 5%", &err), -EINVAL);
	CHECK_EQ(queue_inject_check("fail:+5%", &err), -EINVAL);
	CHECK_EQ(queue_inject_check("fail:0x5%", &err), -EINVAL);
	CHECK_EQ(queue_inject_check("fail:1e1%", &err), -EINVAL);
}

TEST_MAIN
