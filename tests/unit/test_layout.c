/* SPDX-License-Identifier: MIT */
/*
 * The layout of the public structs. Programs were compiled with it: what is here may gain fields at
 * the end of structs that carry their size, or out of the reserved room of the others, but nothing
 * moves without a new soname.
 */
#include <stddef.h>
#include "penstock.h"
#include "test.h"

/* All supported machines have 64 bits and the same rules of alignment. */
#define AT(type, field, offset)                                                          \
	_Static_assert(offsetof(struct type, field) == (offset), #type "." #field " moved")
#define SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type " changed its size")

SIZE(pen_error, 824);
AT(pen_error, offset, 16);
AT(pen_error, operation, 24);
AT(pen_error, object, 56);
AT(pen_error, message, 312);
AT(pen_error, hint, 568);

SIZE(pen_extent, 112);
AT(pen_extent, object, 0);
AT(pen_extent, offset, 8);
AT(pen_extent, memory, 16);
AT(pen_extent, length, 24);
AT(pen_extent, rows, 32);
AT(pen_extent, object_pitch, 40);
AT(pen_extent, memory_pitch, 48);
AT(pen_extent, group, 56);
AT(pen_extent, device, 64);
AT(pen_extent, flags, 72);
AT(pen_extent, fill, 76);
AT(pen_extent, form, 80);
AT(pen_extent, reserved, 88);

AT(pen_options, size, 0);
AT(pen_options, transfer, 8);
AT(pen_options, cache, 12);
AT(pen_options, memory_limit, 16);
AT(pen_options, request_size, 24);
AT(pen_options, lanes, 32);
AT(pen_options, depth, 36);
AT(pen_options, gap, 40);
AT(pen_options, stream, 48);
AT(pen_options, inject, 56);
AT(pen_options, allocate, 64);
AT(pen_options, allocated, 72);
AT(pen_options, groups, 80);
AT(pen_options, streams, 88);
AT(pen_options, stream_count, 96);
AT(pen_options, digests, 104);
AT(pen_options, digest_count, 112);

SIZE(pen_digests, 80);
AT(pen_digests, chunk, 8);
AT(pen_digests, values, 24);
AT(pen_digests, states, 32);
AT(pen_digests, kind, 40);

SIZE(pen_stream, 32);
SIZE(pen_path, 248);
AT(pen_path, bytes, 24);
AT(pen_path, reason, 32);

AT(pen_report, bytes, 8);
AT(pen_report, seconds, 24);
AT(pen_report, pinned_bytes, 56);
AT(pen_report, device, 64);
AT(pen_report, requests, 104);
AT(pen_report, latency_us_p50, 136);
AT(pen_report, path_count, 168);
AT(pen_report, paths, 176);
AT(pen_report, refused, 176 + 12 * 248);
AT(pen_report, digested_bytes, 176 + 24 * 248);
AT(pen_report, delivered_bytes, 176 + 24 * 248 + 256);

SIZE(pen_progress, 32);

SIZE(pen_tensor, 80);
AT(pen_tensor, dtype, 8);
AT(pen_tensor, shape, 16);
AT(pen_tensor, bytes, 24);
AT(pen_tensor, file, 32);
AT(pen_tensor, offset, 40);
AT(pen_tensor, name_length, 48);

SIZE(pen_metadata, 48);
SIZE(pen_model_file, 88);
AT(pen_model_file, metadata, 40);
AT(pen_model_file, object, 48);
SIZE(pen_placement, 64);
AT(pen_placement, memory, 24);
AT(pen_placement, device, 32);
AT(pen_placement, form, 40);
SIZE(pen_range, 64);

TEST(zeroed_options_are_the_defaults)
{
	struct pen_options zeroed = { .size = sizeof(zeroed) }, defaults = PEN_OPTIONS_INIT;

	CHECK(!memcmp(&zeroed, &defaults, sizeof(zeroed)));
	CHECK_EQ(zeroed.transfer, PEN_AUTO);
	CHECK_EQ(zeroed.cache, PEN_CACHE_AUTO);
}

TEST(transfer_types_keep_the_numbers_people_know)
{
	static const char *const names[] = {
		"GPU_DIRECT", "CPU_ONLY", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU",
		"GPU_DIRECT_ASYNC", "GPU_BATCH", "GPU_BATCH_STREAM",
	};

	for (int i = 0; i < 8; i++) {
		char number[2] = { (char)('0' + i), 0 };
		struct pen_error err;
		int type;

		CHECK_EQ(pen_transfer_parse(number, &type, &err), 0);
		CHECK_TEXT(pen_transfer_name(type), names[i]);
		CHECK_EQ(pen_transfer_number(type), i);
	}
	CHECK_EQ(pen_transfer_number(PEN_AUTO), -1);
	CHECK_EQ(pen_transfer_number(PEN_MAPPED), -1);
}

TEST(a_report_without_a_size_is_refused_and_the_job_lives_on)
{
	struct pen_report empty = { 0 }, report = PEN_REPORT_INIT;
	struct pen_device *host;
	struct pen_error err;
	struct pen_job *job;

	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	CHECK_EQ(pen_transfer(PEN_READ, host, NULL, 0, NULL, &empty, &err), -22);
	CHECK_EQ(pen_job_start(PEN_READ, host, NULL, 0, NULL, &job, &err), 0);
	CHECK_EQ(pen_job_wait(job, &empty, &err), -22);
	CHECK(strstr(err.hint, "PEN_REPORT_INIT"));
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	pen_device_close(host);
}

TEST(domains_of_later_versions_have_a_name)
{
	CHECK_TEXT(pen_domain_name(PEN_DOMAIN_ERRNO), "errno");
	CHECK_TEXT(pen_domain_name(PEN_DOMAIN_FORMAT), "format");
	CHECK_TEXT(pen_domain_name(PEN_DOMAIN_FORMAT + 1), "unknown");
	CHECK_TEXT(pen_domain_name(-1), "unknown");
}

TEST_MAIN
