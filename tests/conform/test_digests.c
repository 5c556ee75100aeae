/* SPDX-License-Identifier: MIT */
/*
 * Digests of chunks as they pass: right on every path that a core sees, in both directions and
 * whatever the order; said to be unverified where a chunk was moved in part or nobody saw it.
 */
#include "kit.h"

#define SIZE (37 * MIB + 12345)
#define CHUNKS_MAX 1024

static uint64_t values[CHUNKS_MAX];
static unsigned char states[CHUNKS_MAX];
static unsigned char bytes[SIZE];
static struct pen_digests digests;
static struct pen_report report = PEN_REPORT_INIT;

static uint64_t count(uint64_t chunk)
{
	return (SIZE + chunk - 1) / chunk;
}

static void ask(struct pen_options *options, struct pen_object *object, int kind, uint64_t chunk)
{
	memset(values, 0, sizeof(values));
	memset(states, 0, sizeof(states));
	digests = (struct pen_digests){
		.object = object, .kind = kind, .chunk = chunk, .count = count(chunk),
		.values = values, .states = states,
	};
	options->digests = &digests;
	options->digest_count = 1;
}

/* Every chunk has the digest of the pattern's bytes. */
static void check_all(int kind, uint64_t chunk)
{
	pattern_fill(bytes, SIZE, 0);
	for (uint64_t i = 0; i < count(chunk); i++) {
		uint64_t at = i * chunk, length = SIZE - at < chunk ? SIZE - at : chunk, wanted;

		OK(pen_digest_of(kind, bytes + at, length, &wanted, &kit_err));
		CHECK_EQ(states[i], PEN_CHUNK_DIGESTED);
		CHECK(values[i] == wanted);
	}
	CHECK_EQ(report.digested_bytes, SIZE);
	CHECK_EQ(report.unverified_bytes, 0);
}

static void both_ways(const char *device_name, struct pen_options *options, int kind,
		      uint64_t chunk)
{
	struct pen_device *device = kit_device(device_name);
	struct pen_extent extents[3];
	struct pen_object *object;
	unsigned char *memory;
	char path[128];

	if (!device)
		SKIP("there is no GPU, not even a fake one");
	kit_at("%s type %s kind %s chunk %llu", device_name, pen_transfer_name(options->transfer),
	       pen_digest_name(kind), (unsigned long long)chunk);
	snprintf(path, sizeof(path), "%s/digested", kit_folder(DISK));
	OK(pen_device_alloc(device, SIZE, (void **)&memory, &kit_err));
	pattern_fill(bytes, SIZE, 0);
	OK(pen_device_put(device, memory, bytes, SIZE, &kit_err));
	/* In three pieces that meet inside a chunk: one chunk has several copies. */
	for (int i = 0; i < 3; i++) {
		uint64_t from = SIZE / 3 * (uint64_t)i;

		extents[i] = (struct pen_extent){ .offset = from, .memory = memory + from,
						  .length = i < 2 ? SIZE / 3 : SIZE - from };
	}
	OK(pen_object_open(path, PEN_WRITE, SIZE, &object, &kit_err));
	for (int i = 0; i < 3; i++)
		extents[i].object = object;
	ask(options, object, kind, chunk);
	OK(pen_transfer(PEN_WRITE, device, extents, 3, options, &report, &kit_err));
	OK(pen_object_commit(object, &kit_err));
	pen_object_close(object);
	check_all(kind, chunk);
	for (int warm = 0; warm < 2; warm++) {
		if (warm)
			kit_warm(path, 0, 0);
		else
			kit_cool(path, 0, 0);
		OK(pen_object_open(path, PEN_READ, 0, &object, &kit_err));
		for (int i = 0; i < 3; i++)
			extents[i].object = object;
		ask(options, object, kind, chunk);
		OK(pen_transfer(PEN_READ, device, extents, 3, options, &report, &kit_err));
		pen_object_close(object);
		check_all(kind, chunk);
	}
	OK(pen_device_free(device, memory, SIZE, &kit_err));
	pen_trim();
	pen_device_close(device);
}

static void on(const char *device)
{
	for (int kind = PEN_DIGEST_XXH3; kind <= PEN_DIGEST_CRC32; kind++) {
		struct pen_options options = PEN_OPTIONS_INIT;

		both_ways(device, &options, kind, 64 * KIB);
		both_ways(device, &options, kind, MIB);
		both_ways(device, &options, kind, 4 * MIB);
	}
}

TEST(chunks_are_digested_on_the_host)
{
	on("host");
}

TEST(chunks_are_digested_on_a_gpu)
{
	on("cuda:0");
}

TEST(chunks_are_digested_through_short_and_failing_requests)
{
	struct pen_options options = PEN_OPTIONS_INIT;

	options.inject = "short:2,short:5,fail:7:EIO,fail:9:EINTR";
	both_ways("host", &options, PEN_DIGEST_XXH3, 64 * KIB);
	both_ways("cuda:0", &options, PEN_DIGEST_XXH3, 64 * KIB);
}

TEST(small_requests_do_not_cut_chunks)
{
	struct pen_options options = PEN_OPTIONS_INIT;

	options.request_size = 64 * KIB;
	both_ways("host", &options, PEN_DIGEST_XXH3, 64 * KIB);
}

/* ---------------------------------------------------------------------------------- cuts -- */

TEST(parts_between_cuts_have_digests_of_their_own)
{
	/* Three records of which two begin in the same chunk, and what lies between them. */
	static const uint64_t cuts[] = { 100, 70 * KIB, 70 * KIB + 1, 90 * KIB, 400 * KIB - 3 };
	static const uint64_t edges[] = {
		0, 100, 64 * KIB, 70 * KIB, 70 * KIB + 1, 90 * KIB, 128 * KIB, 192 * KIB, 256 * KIB,
		320 * KIB, 384 * KIB, 400 * KIB - 3, 448 * KIB, 512 * KIB,
	};
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extents[2] = {
		{ .memory = bytes, .length = 70 * KIB + 1 },
		{ .offset = 90 * KIB, .memory = bytes + 90 * KIB, .length = 310 * KIB - 3 },
	};
	char path[128];

	snprintf(path, sizeof(path), "%s/cuts", kit_folder(DISK));
	kit_pattern(path, SIZE);
	OK(pen_object_open(path, PEN_READ, 0, &extents[0].object, &kit_err));
	extents[1].object = extents[0].object;
	ask(&options, extents[0].object, PEN_DIGEST_CRC32, 64 * KIB);
	digests.cuts = cuts;
	digests.cut_count = COUNT(cuts);
	digests.count = COUNT(edges) - 1;
	options.gap = UINT64_MAX;
	OK(pen_transfer(PEN_READ, host, extents, 2, &options, &report, &kit_err));
	pattern_fill(bytes, SIZE, 0);
	for (size_t i = 0; i + 1 < COUNT(edges); i++) {
		bool between = edges[i] == 70 * KIB + 1, after = edges[i] >= 400 * KIB - 3;
		uint64_t wanted;

		CHECK_EQ(states[i], between || after ? PEN_CHUNK_UNTOUCHED : PEN_CHUNK_DIGESTED);
		OK(pen_digest_of(PEN_DIGEST_CRC32, bytes + edges[i], edges[i + 1] - edges[i],
				 &wanted, &kit_err));
		CHECK(between || after || values[i] == wanted);
	}
	CHECK_EQ(report.digested_bytes, 380 * KIB - 2);
	CHECK_EQ(report.unverified_bytes, 0);
	pen_object_close(extents[0].object);
	pen_device_close(host);
}

TEST(cuts_that_are_none_are_refused)
{
	static const uint64_t wrong[][2] = {
		{ 0, 1 }, { 1, 64 * KIB }, { 2, 1 }, { 3, 3 }, { 128 * KIB, 128 * KIB + 1 },
	};
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extent = { .memory = bytes, .length = MIB };

	OK(pen_object_open("pattern:1M", PEN_READ, 0, &extent.object, &kit_err));
	ask(&options, extent.object, PEN_DIGEST_XXH3, 64 * KIB);
	digests.cut_count = 2;
	REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL, &kit_err));
	for (size_t i = 0; i < COUNT(wrong); i++) {
		digests.cuts = wrong[i];
		REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL,
					      &kit_err));
	}
	pen_object_close(extent.object);
	pen_device_close(host);
}

/* ---------------------------------------------------------------------------- unverified -- */

TEST(a_chunk_that_was_read_in_part_is_unverified)
{
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extent = { .offset = 100 * KIB, .memory = bytes, .length = 300 * KIB };
	uint64_t wanted;
	char path[128];

	snprintf(path, sizeof(path), "%s/part", kit_folder(DISK));
	kit_pattern(path, SIZE);
	OK(pen_object_open(path, PEN_READ, 0, &extent.object, &kit_err));
	ask(&options, extent.object, PEN_DIGEST_XXH3, 64 * KIB);
	OK(pen_transfer(PEN_READ, host, &extent, 1, &options, &report, &kit_err));
	CHECK_EQ(states[0], PEN_CHUNK_UNTOUCHED);
	CHECK_EQ(states[1], PEN_CHUNK_UNVERIFIED);
	for (int i = 2; i < 6; i++)
		CHECK_EQ(states[i], PEN_CHUNK_DIGESTED);
	CHECK_EQ(states[6], PEN_CHUNK_UNVERIFIED);
	CHECK_EQ(states[7], PEN_CHUNK_UNTOUCHED);
	CHECK_EQ(report.digested_bytes, 256 * KIB);
	CHECK_EQ(report.unverified_bytes, 44 * KIB);
	OK(pen_digest_of(PEN_DIGEST_XXH3, bytes + 28 * KIB, 64 * KIB, &wanted, &kit_err));
	CHECK(values[2] == wanted);
	pen_object_close(extent.object);
	pen_device_close(host);
}

static void nobody_sees(int transfer)
{
	struct pen_device *gpu = kit_device("cuda:0");
	struct pen_options options = { .size = sizeof(options), .transfer = transfer };
	struct pen_extent extent = { .length = SIZE };
	char path[128];
	int rc;

	if (!gpu)
		SKIP("there is no GPU, not even a fake one");
	snprintf(path, sizeof(path), "%s/unseen", kit_folder(DISK));
	kit_pattern(path, SIZE);
	OK(pen_device_alloc(gpu, SIZE, &extent.memory, &kit_err));
	OK(pen_object_open(path, PEN_READ, 0, &extent.object, &kit_err));
	ask(&options, extent.object, PEN_DIGEST_XXH3, MIB);
	rc = pen_transfer(PEN_READ, gpu, &extent, 1, &options, &report, &kit_err);
	if (rc == -ENOTSUP)
		SKIP("this path cannot be had here");
	OK(rc);
	for (uint64_t i = 0; i < count(MIB); i++)
		CHECK_EQ(states[i], PEN_CHUNK_UNVERIFIED);
	CHECK_EQ(report.digested_bytes, 0);
	CHECK_EQ(report.unverified_bytes, SIZE);
	pen_object_close(extent.object);
	OK(pen_device_free(gpu, extent.memory, SIZE, &kit_err));
	pen_trim();
	pen_device_close(gpu);
}

TEST(what_cufile_moves_is_unverified)
{
	nobody_sees(PEN_GPU_DIRECT);
}

TEST(what_is_mapped_is_unverified)
{
	nobody_sees(PEN_MAPPED);
}

TEST(auto_takes_no_path_on_which_nobody_sees_the_bytes)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_device *gpu = kit_device("cuda:0");
	struct pen_extent extent = { .length = 128 * MIB };
	char path[128];
	bool said = false;

	if (!gpu)
		SKIP("there is no GPU, not even a fake one");
	if (sysconf(_SC_NPROCESSORS_ONLN) > 4)
		SKIP("with so many cores nothing is mapped");
	snprintf(path, sizeof(path), "%s/auto", kit_folder(DISK));
	kit_pattern(path, 128 * MIB);
	kit_warm(path, 0, 0);
	OK(pen_device_alloc(gpu, 128 * MIB, &extent.memory, &kit_err));
	OK(pen_object_open(path, PEN_READ, 0, &extent.object, &kit_err));
	OK(pen_transfer(PEN_READ, gpu, &extent, 1, &options, &report, &kit_err));
	CHECK_TEXT(report.paths[0].path, "mapped");
	ask(&options, extent.object, PEN_DIGEST_XXH3, MIB);
	digests.count = 128;
	OK(pen_transfer(PEN_READ, gpu, &extent, 1, &options, &report, &kit_err));
	CHECK_EQ(report.digested_bytes, 128 * MIB);
	for (uint32_t i = 0; i < report.refused_count; i++)
		said |= !strcmp(report.refused[i].path, "mapped") &&
			strstr(report.refused[i].reason, "digest");
	CHECK(said);
	pen_object_close(extent.object);
	OK(pen_device_free(gpu, extent.memory, 128 * MIB, &kit_err));
	pen_trim();
	pen_device_close(gpu);
}

/* ------------------------------------------------------------------------------- refused -- */

TEST(no_chunk_is_larger_than_what_the_store_takes)
{
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extent = { .memory = bytes, .length = 16 * MIB };

	OK(pen_object_open("pattern:16M,most=64K", PEN_READ, 0, &extent.object, &kit_err));
	for (uint64_t chunk = 128 * KIB; chunk <= 16 * MIB; chunk *= 2) {
		ask(&options, extent.object, PEN_DIGEST_XXH3, chunk);
		REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL,
					      &kit_err));
	}
	ask(&options, extent.object, PEN_DIGEST_XXH3, 64 * KIB);
	OK(pen_transfer(PEN_READ, host, &extent, 1, &options, &report, &kit_err));
	CHECK_EQ(report.digested_bytes, 16 * MIB);
	pen_object_close(extent.object);
	pen_device_close(host);
}

TEST(what_a_barred_path_leaves_is_digested_once)
{
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extent = { .memory = bytes, .length = SIZE };
	char path[128];

	snprintf(path, sizeof(path), "%s/barred", kit_folder(DISK));
	pattern_fill(bytes, SIZE, 0);
	OK(pen_object_open(path, PEN_WRITE, SIZE, &extent.object, &kit_err));
	ask(&options, extent.object, PEN_DIGEST_XXH3, 64 * KIB);
	options.inject = "fail:2:EINVAL,fail:9:EINVAL";
	OK(pen_transfer(PEN_WRITE, host, &extent, 1, &options, &report, &kit_err));
	OK(pen_object_commit(extent.object, &kit_err));
	pen_object_close(extent.object);
	CHECK(kit_holds(path, SIZE));
	check_all(PEN_DIGEST_XXH3, 64 * KIB);
	pen_device_close(host);
}

TEST(what_makes_no_sense_is_refused)
{
	static const uint64_t chunks[] = { 0, 1, 32 * KIB, 96 * KIB, 32 * MIB };
	struct pen_device *host = kit_device("host");
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extent = { .memory = bytes, .length = MIB };

	OK(pen_object_open("pattern:1M", PEN_READ, 0, &extent.object, &kit_err));
	for (size_t i = 0; i < COUNT(chunks); i++) {
		ask(&options, extent.object, PEN_DIGEST_XXH3, 64 * KIB);
		digests.chunk = chunks[i];
		REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL,
					      &kit_err));
	}
	ask(&options, extent.object, 99, 64 * KIB);
	REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL, &kit_err));
	ask(&options, NULL, PEN_DIGEST_XXH3, 64 * KIB);
	REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL, &kit_err));
	ask(&options, extent.object, PEN_DIGEST_XXH3, 64 * KIB);
	digests.reserved[1] = 1;
	REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL, &kit_err));
	/* Tables that are not there, or two for one object. */
	options.digests = NULL;
	REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL, &kit_err));
	ask(&options, extent.object, PEN_DIGEST_XXH3, 64 * KIB);
	{
		struct pen_digests two[2] = { digests, digests };

		options.digests = two;
		options.digest_count = 2;
		REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL,
					      &kit_err));
	}
	/* A chunk must fit into a request, and a request into the memory limit. */
	ask(&options, extent.object, PEN_DIGEST_XXH3, MIB);
	options.request_size = 64 * KIB;
	REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL, &kit_err));
	options.request_size = 0;
	options.memory_limit = MIB;
	REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL, &kit_err));
	CHECK(strstr(kit_err.hint, "at least 2048 KiB") != NULL);
	pen_object_close(extent.object);
	pen_device_close(host);
}

TEST_MAIN
