/* SPDX-License-Identifier: MIT */
/*
 * Plans. The idea of the large test: a plan is right when running it on bytes in memory does what
 * the extents say one by one, and when it keeps the invariants of plan.h. One checker asks both
 * of every plan made here, and of 2000 random sets of extents in each direction.
 */
#include <errno.h>
#include "engine/plan.h"
#include "io/object.h"
#include "mem/device.h"
#include "sys/os.h"
#include "test.h"

#define STORE (64u << 10)
#define OBJECTS 3
#define ARENA (1u << 20)
#define EXTENTS 24

/* Devices in name only: a plan moves nothing. */
static struct pen_device host = { .name = "host", .is_host = true }, gpus[2];
static struct pen_object objects[OBJECTS];
static unsigned char stores[OBJECTS][STORE], wanted_stores[OBJECTS][STORE];
static unsigned char arena[ARENA], wanted_arena[ARENA];
static unsigned char touched[ARENA], wanted_touched[ARENA];
static struct pen_extent extents[EXTENTS + PLAN_DEVICES];
static size_t extent_count;
static struct plan_wishes wishes;
static uint64_t seed = 1;

static uint32_t chance(uint32_t below)
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return below ? (uint32_t)(seed >> 33) % below : 0;
}

static void scramble(unsigned char *bytes, size_t size)
{
	for (size_t i = 0; i < size; i++)
		bytes[i] = (unsigned char)chance(256);
}

static void set_up(bool write, uint32_t align, uint64_t unit, uint64_t gap)
{
	static const char *const names[OBJECTS] = { "first", "second", "third" };

	memset(objects, 0, sizeof(objects));
	for (int i = 0; i < OBJECTS; i++) {
		objects[i].ops = &object_file_ops;
		objects[i].name = (char *)names[i];
		objects[i].mode = write ? PEN_WRITE : PEN_READ;
		objects[i].info.size = STORE;
		objects[i].info.offset_align = align;
		objects[i].fd = objects[i].direct_fd = -1;
	}
	extent_count = 0;
	wishes = (struct plan_wishes){ .device = &host, .write = write, .unit = unit, .gap = gap };
}

static void add(int object, uint64_t offset, uint64_t length, uint64_t at)
{
	extents[extent_count++] = (struct pen_extent){
		.object = &objects[object],
		.offset = offset,
		.length = length,
		.memory = arena + at,
	};
}

static void add_fill(int object, uint64_t offset, uint64_t length, uint32_t byte)
{
	extents[extent_count++] = (struct pen_extent){
		.object = &objects[object], .offset = offset, .length = length,
		.flags = PEN_FILL, .fill = byte,
	};
}

static void add_rows(int object, uint64_t offset, uint64_t length, uint64_t at, uint64_t rows,
		     uint64_t object_pitch, uint64_t memory_pitch)
{
	add(object, offset, length, at);
	extents[extent_count - 1].rows = rows;
	extents[extent_count - 1].object_pitch = object_pitch;
	extents[extent_count - 1].memory_pitch = memory_pitch;
}

static struct plan *make(void)
{
	struct pen_error err;
	struct plan *plan;

	if (plan_new(extents, extent_count, &wishes, &plan, &err)) {
		fprintf(stderr, "refused: %s. %s\n", err.message, err.hint);
		CHECK(0);
	}
	return plan;
}

static struct pen_error refusal;

static int refused(void)
{
	struct plan *plan;
	int rc;

	memset(&refusal, 0, sizeof(refusal));
	rc = plan_new(extents, extent_count, &wishes, &plan, &refusal);
	CHECK(!plan || !rc);
	plan_free(plan);
	CHECK(!rc || (refusal.code == rc && refusal.message[0]));
	return rc;
}

/* What the extents say, one by one; returns how many bytes are constant. */
static uint64_t run_extents(void)
{
	uint64_t fill_bytes = 0;

	memcpy(wanted_arena, arena, ARENA);
	memcpy(wanted_stores, stores, sizeof(stores));
	memset(wanted_touched, 0, ARENA);
	for (size_t i = 0; i < extent_count; i++) {
		const struct pen_extent *e = &extents[i];
		size_t object = (size_t)(e->object - objects);

		for (uint64_t row = 0; row < (e->rows ? e->rows : 1) && e->length; row++) {
			uint64_t offset = e->offset + row * e->object_pitch;
			size_t at = (size_t)((unsigned char *)e->memory - arena) +
				    row * e->memory_pitch;

			if (e->flags & PEN_FILL) {
				memset(&wanted_stores[object][offset], (int)e->fill, e->length);
				fill_bytes += e->length;
				continue;
			}
			if (wishes.write)
				memcpy(&wanted_stores[object][offset], arena + at, e->length);
			else
				memcpy(wanted_arena + at, &stores[object][offset], e->length);
			for (uint64_t b = 0; b < e->length; b++)
				wanted_touched[at + b]++;
		}
	}
	return fill_bytes;
}

/* A row of a copy, into a request's buffer or out of it. */
static void run_row(const struct plan *plan, const struct plan_copy *copy, uint64_t row,
		    unsigned char *bytes)
{
	unsigned char *memory;

	if (copy->place == PLACE_FILL) {
		CHECK(wishes.write && copy->rows == 1);
		memset(bytes, (int)copy->offset, copy->width);
		return;
	}
	memory = plan_memory(plan, copy) + row * copy->memory_pitch;
	CHECK(memory >= arena && memory + copy->width <= arena + ARENA);
	if (wishes.write)
		memcpy(bytes, memory, copy->width);
	else
		memcpy(memory, bytes, copy->width);
	for (uint64_t b = 0; b < copy->width; b++)
		touched[memory - arena + b]++;
}

static void run_request(const struct plan *plan, const struct plan_request *request)
{
	static unsigned char buffer[STORE], filled[STORE];
	size_t object = (size_t)(plan->objects[request->object] - objects);

	memset(filled, 0, request->length);
	if (!wishes.write)
		memcpy(buffer, &stores[object][request->offset], request->length);
	for (uint32_t c = 0; c < request->copy_count; c++) {
		const struct plan_copy *copy = &plan->copies[request->first_copy + c];

		CHECK(copy->rows >= 1 && copy->width >= 1);
		for (uint64_t row = 0; row < copy->rows; row++) {
			uint64_t at = copy->at + row * copy->at_pitch;

			CHECK(at + copy->width <= request->length);
			run_row(plan, copy, row, buffer + at);
			for (uint64_t b = 0; b < copy->width; b++)
				filled[at + b]++;
		}
	}
	if (!wishes.write)
		return;
	/* Invariant 3: no byte of a write that no copy fills, and none filled twice. */
	for (uint32_t b = 0; b < request->length; b++)
		CHECK_EQ(filled[b], 1);
	memcpy(&stores[object][request->offset], buffer, request->length);
}

static void check_inside_one_extent(const struct plan *plan, const struct plan_copy *copy)
{
	const unsigned char *begin, *end;

	if (copy->place == PLACE_FILL || plan_device(plan, copy)->is_host)
		return;
	begin = plan_memory(plan, copy);
	end = begin + (copy->rows - 1) * copy->memory_pitch + copy->width;
	for (size_t i = 0; i < extent_count; i++) {
		const struct pen_extent *e = &extents[i];
		const unsigned char *from = e->memory;
		uint64_t rows = e->rows ? e->rows : 1;

		if (!(e->flags & PEN_FILL) && begin >= from &&
		    end <= from + (rows - 1) * e->memory_pitch + e->length &&
		    plan_device(plan, copy) == (e->device ? e->device : wishes.device))
			return;
	}
	CHECK(!"a copy that lies in one extent");
}

static void check_shape(const struct plan *plan)
{
	const struct plan_request *before = NULL;

	for (size_t i = 0; i < plan->request_count; i++) {
		const struct plan_request *r = &plan->requests[i];
		const struct plan_copy *copy = &plan->copies[r->first_copy];
		uint64_t end = r->offset + r->length;

		CHECK(r->length && r->copy_count && r->object < plan->object_count);
		CHECK(r->first_copy + r->copy_count <= plan->copy_count);
		CHECK(end <= STORE);
		if (before && !wishes.straight)
			CHECK(before->object < r->object ||
			      (before->object == r->object &&
			       before->offset + before->length <= r->offset));
		CHECK_EQ(r->offset / wishes.unit, (end - 1) / wishes.unit);
		/* What is on a GPU travels alone where it goes straight. */
		if (wishes.straight && (r->copy_count == 1 || copy->place != PLACE_FILL) &&
		    copy->place != PLACE_FILL && !plan_device(plan, copy)->is_host)
			CHECK(plan_on_gpu(plan, (uint32_t)i) && !copy->at);
		/* No copy reaches from one extent's memory on a GPU into another's. */
		for (uint32_t c = 0; c < r->copy_count; c++)
			check_inside_one_extent(plan, copy + c);
		before = r;
	}
}

/* All that must hold of any plan; frees it. */
static void check_plan(struct plan *plan)
{
	uint64_t bytes = 0;

	check_shape(plan);
	bytes += run_extents();
	memset(touched, 0, ARENA);
	for (size_t i = 0; i < plan->request_count; i++)
		run_request(plan, &plan->requests[i]);
	for (size_t i = 0; i < ARENA; i++)
		bytes += wanted_touched[i];
	CHECK_EQ(plan->bytes, bytes);
	CHECK(!memcmp(touched, wanted_touched, ARENA));
	CHECK(!memcmp(arena, wanted_arena, ARENA));
	CHECK(!memcmp(stores, wanted_stores, sizeof(stores)));
	plan_free(plan);
}

TEST(requests_are_sorted_by_object_and_offset)
{
	struct plan *plan;

	set_up(false, 4096, 4096, 0);
	add(1, 9000, 100, 0);
	add(0, 50000, 100, 200);
	add(1, 100, 100, 400);
	add(0, 20000, 100, 600);
	plan = make();
	CHECK_EQ(plan->request_count, 4);
	CHECK_EQ(plan->object_count, 2);
	CHECK_EQ(plan->requests[0].offset, 100);
	CHECK_EQ(plan->requests[1].offset, 9000);
	CHECK_EQ(plan->requests[2].offset, 20000);
	CHECK_EQ(plan->requests[3].offset, 50000);
	check_plan(plan);
}

TEST(neighbours_merge_across_a_gap_up_to_the_limit)
{
	struct plan *plan;

	set_up(false, 0, 65536, 50);
	add(0, 100, 100, 0);
	add(0, 250, 90, 5000);
	add(0, 391, 100, 300);
	plan = make();
	CHECK_EQ(plan->request_count, 2);
	CHECK_EQ(plan->requests[0].offset, 100);
	CHECK_EQ(plan->requests[0].length, 240);
	CHECK_EQ(plan->requests[0].copy_count, 2);
	CHECK_EQ(plan->requests[1].offset, 391);
	check_plan(plan);
}

TEST(no_gap_means_only_neighbours_that_touch_merge)
{
	struct plan *plan;

	set_up(false, 0, 65536, 0);
	add(0, 100, 100, 0);
	add(0, 200, 100, 100);
	add(0, 301, 100, 300);
	plan = make();
	CHECK_EQ(plan->request_count, 2);
	CHECK_EQ(plan->requests[0].length, 200);
	check_plan(plan);
}

TEST(requests_are_cut_at_multiples_of_the_unit)
{
	struct plan *plan;

	set_up(false, 512, 4096, 0);
	add(0, 4000, 10000, 0);
	plan = make();
	CHECK_EQ(plan->request_count, 4);
	CHECK_EQ(plan->requests[0].length, 96);
	CHECK_EQ(plan->requests[1].offset, 4096);
	CHECK_EQ(plan->requests[1].length, 4096);
	CHECK_EQ(plan->requests[3].length, 14000 - 12288);
	check_plan(plan);
}

TEST(a_ragged_write_is_cut_like_a_read)
{
	struct plan *plan;

	/* Its ragged ends travel with the rest: whoever sends it goes by the store's blocks. */
	set_up(true, 4096, 16384, 0);
	add(0, 1000, 20000, 0);
	plan = make();
	CHECK_EQ(plan->request_count, 2);
	CHECK_EQ(plan->requests[0].length, 15384);
	CHECK_EQ(plan->requests[1].length, 4616);
	check_plan(plan);
}

TEST(header_padding_and_tensors_of_many_devices_are_one_run_of_whole_blocks)
{
	struct plan *plan;

	set_up(true, 4096, 16384, 0);
	add(0, 0, 777, 0);
	add_fill(0, 777, 4096 - 777, ' ');
	for (int i = 0; i < 5; i++) {
		uint64_t at = 4096 + (uint64_t)i * 8192;

		add(0, at, 8000, at);
		extents[extent_count - 1].device = &gpus[i % 2];
		add_fill(0, at + 8000, 192, 0);
	}
	plan = make();
	CHECK_EQ(plan->device_count, 3);
	CHECK_EQ(plan->device_bytes[0], 777);
	CHECK_EQ(plan->device_bytes[1], 24000);
	CHECK_EQ(plan->request_count, 3);
	for (size_t i = 0; i < 3; i++)
		CHECK(plan->requests[i].offset % 4096 == 0 && plan->requests[i].length % 4096 == 0);
	check_plan(plan);
}

TEST(neighbouring_fills_of_one_byte_are_one)
{
	struct plan *plan;

	set_up(true, 4096, 16384, 0);
	add_fill(0, 0, 100, 7);
	add_fill(0, 100, 100, 7);
	add_fill(0, 200, 100, 8);
	plan = make();
	CHECK_EQ(plan->request_count, 1);
	CHECK_EQ(plan->copy_count, 2);
	CHECK(!plan_is_stretch(plan, 0));
	check_plan(plan);
}

TEST(a_fill_that_makes_no_sense_is_refused)
{
	set_up(true, 4096, 16384, 0);
	add_fill(0, 0, 100, 256);
	CHECK_EQ(refused(), -EINVAL);
	extents[0].fill = 255;
	CHECK_EQ(refused(), 0);
	extents[0].memory = arena;
	CHECK_EQ(refused(), -EINVAL);
	extents[0].memory = NULL;
	extents[0].device = &host;
	CHECK_EQ(refused(), -EINVAL);
	extents[0].device = NULL;
	extents[0].flags = 2;
	CHECK_EQ(refused(), -EINVAL);
	extents[0].flags = PEN_FILL;
	extents[0].reserved[2] = 1;
	CHECK_EQ(refused(), -EINVAL);
	set_up(false, 4096, 16384, 0);
	add_fill(0, 0, 100, 1);
	CHECK_EQ(refused(), -EINVAL);
}

TEST(more_devices_than_a_plan_holds_are_refused)
{
	static struct pen_device many[PLAN_DEVICES];

	set_up(false, 0, 16384, 0);
	for (int i = 0; i < PLAN_DEVICES - 1; i++) {
		add(0, (uint64_t)i * 100, 100, (uint64_t)i * 100);
		extents[extent_count - 1].device = &many[i];
	}
	CHECK_EQ(refused(), 0);
	add(0, 5000, 100, 5000);
	extents[extent_count - 1].device = &many[PLAN_DEVICES - 1];
	CHECK_EQ(refused(), -E2BIG);
}

TEST(writes_do_not_merge_across_holes)
{
	struct plan *plan;

	set_up(true, 4096, 65536, 60000);
	add(0, 0, 100, 0);
	add(0, 101, 100, 101);
	plan = make();
	CHECK_EQ(plan->request_count, 2);
	check_plan(plan);
}

TEST(rows_fold_into_one_strided_copy)
{
	struct plan *plan;

	set_up(false, 0, 65536, 4096);
	add_rows(0, 1000, 100, 0, 8, 300, 128);
	plan = make();
	CHECK_EQ(plan->request_count, 1);
	CHECK_EQ(plan->copy_count, 1);
	CHECK_EQ(plan->copies[0].rows, 8);
	CHECK_EQ(plan->copies[0].at_pitch, 300);
	CHECK_EQ(plan->copies[0].memory_pitch, 128);
	check_plan(plan);
}

TEST(separate_extents_at_a_constant_distance_fold_as_well)
{
	struct plan *plan;

	set_up(false, 0, 65536, 4096);
	for (int i = 0; i < 8; i++)
		add(0, 1000 + (uint64_t)i * 300, 100, (uint64_t)i * 5000);
	plan = make();
	CHECK_EQ(plan->copy_count, 1);
	CHECK_EQ(plan->copies[0].rows, 8);
	check_plan(plan);
}

TEST(rows_that_go_backwards_in_memory_are_not_folded)
{
	struct plan *plan;

	set_up(false, 0, 65536, 4096);
	for (int i = 0; i < 8; i++)
		add(0, 1000 + (uint64_t)i * 300, 100, 50000 - (uint64_t)i * 500);
	plan = make();
	CHECK_EQ(plan->copy_count, 8);
	check_plan(plan);
}

TEST(what_may_be_allocated_one_by_one_is_copied_one_by_one)
{
	struct plan *plan;

	set_up(false, 0, 65536, 0);
	wishes.device = &gpus[0];
	for (int i = 0; i < 8; i++)
		add(0, (uint64_t)i * 100, 100, (uint64_t)i * 100);
	plan = make();
	CHECK_EQ(plan->request_count, 1);
	CHECK_EQ(plan->copy_count, 8);
	plan_free(plan);
	/* The rows of one extent have one memory. */
	set_up(false, 0, 65536, 0);
	wishes.device = &gpus[0];
	add_rows(0, 0, 100, 0, 8, 100, 100);
	plan = make();
	CHECK_EQ(plan->copy_count, 1);
	plan_free(plan);
}

TEST(what_is_contiguous_on_both_sides_is_one_copy)
{
	struct plan *plan;

	set_up(false, 0, 65536, 0);
	for (int i = 0; i < 8; i++)
		add(0, 1000 + (uint64_t)i * 100, 100, (uint64_t)i * 100);
	plan = make();
	CHECK_EQ(plan->request_count, 1);
	CHECK_EQ(plan->copy_count, 1);
	CHECK_EQ(plan->copies[0].rows, 1);
	CHECK_EQ(plan->copies[0].width, 800);
	check_plan(plan);
}

TEST(nothing_and_zero_lengths_make_an_empty_plan)
{
	struct plan *plan;

	set_up(false, 0, 4096, 0);
	plan = make();
	CHECK(!plan->request_count && !plan->bytes);
	plan_free(plan);
	add(0, 10, 0, 0);
	extents[0].memory = NULL;
	add_rows(1, STORE, 0, 0, 100, 0, 0);
	plan = make();
	CHECK(!plan->request_count && !plan->bytes);
	plan_free(plan);
}

TEST(overlapping_reads_each_get_their_bytes)
{
	struct plan *plan;

	set_up(false, 0, 4096, 0);
	scramble(&stores[0][0], STORE);
	add(0, 0, 10000, 0);
	add(0, 5000, 10000, 20000);
	add(0, 5000, 10000, 40000);
	add(0, 100, 10, 60000);
	plan = make();
	CHECK_EQ(plan->request_count, 4);
	check_plan(plan);
}

TEST(overlapping_writes_are_refused_with_the_place)
{
	set_up(true, 4096, 4096, 0);
	add(0, 1000, 100, 0);
	add(0, 5000, 100, 200);
	add(0, 1099, 100, 400);
	CHECK_EQ(refused(), -EINVAL);
	CHECK_EQ(refusal.offset, 1099);
	CHECK_TEXT(refusal.object, "first");
	CHECK(refusal.hint[0]);
	/* The same ranges of different objects, and ranges that only touch, are fine. */
	extents[2].object = &objects[1];
	CHECK_EQ(refused(), 0);
	extents[2].object = &objects[0];
	extents[2].offset = 1100;
	CHECK_EQ(refused(), 0);
	extents[2].length = 0;
	extents[2].offset = 1050;
	CHECK_EQ(refused(), 0);
}

TEST(overlapping_rows_of_two_write_extents_are_refused)
{
	set_up(true, 4096, 4096, 0);
	add_rows(0, 0, 100, 0, 10, 200, 100);
	add_rows(0, 100, 100, 2000, 10, 200, 100);
	CHECK_EQ(refused(), 0);
	extents[1].length = 101;
	extents[1].memory_pitch = 101;
	CHECK_EQ(refused(), -EINVAL);
}

TEST(straight_plans_put_each_request_into_one_stretch_of_memory)
{
	struct plan *plan;

	set_up(false, 512, 8192, 65536);
	wishes.straight = true;
	wishes.device = &gpus[0];
	add(0, 0, 100, 0);
	add(0, 100, 100, 100);
	add(0, 200, 100, 1000);
	add(0, 250, 20000, 2000);
	add_rows(1, 0, 50, 40000, 3, 100, 50);
	plan = make();
	CHECK_EQ(plan->requests[0].length, 100);
	CHECK_EQ(plan->requests[1].length, 100);
	CHECK(!plan_stretches_on(plan, 0, 1));
	check_plan(plan);
	/* In what the job allocates, neighbours are one. */
	extent_count = 2;
	extents[0].memory = NULL;
	extents[1].memory = (void *)(uintptr_t)100;
	wishes.allocate = 200;
	plan = make();
	CHECK_EQ(plan->request_count, 1);
	CHECK_EQ(plan->requests[0].length, 200);
	CHECK(plan_on_gpu(plan, 0));
	plan_free(plan);
}

TEST(several_objects_share_one_plan)
{
	struct plan *plan;

	set_up(false, 512, 8192, 100);
	for (int i = 0; i < 9; i++)
		add(i % 3, (uint64_t)i * 3000, 3000, (uint64_t)(8 - i) * 3000);
	plan = make();
	CHECK_EQ(plan->object_count, 3);
	check_plan(plan);
}

TEST(a_hole_larger_than_a_unit_is_not_read)
{
	struct plan *plan;
	uint64_t read = 0;

	set_up(false, 512, 4096, 65536);
	add(0, 0, 100, 0);
	add(0, 40000, 100, 100);
	plan = make();
	for (size_t i = 0; i < plan->request_count; i++)
		read += plan->requests[i].length;
	CHECK(read <= 2 * 4096);
	check_plan(plan);
}

TEST(what_makes_no_sense_is_refused_in_words)
{
	set_up(false, 512, 4096, 0);
	add(0, STORE - 100, 101, 0);
	CHECK_EQ(refused(), -ERANGE);
	CHECK(refusal.hint[0] && strstr(refusal.message, "65537"));
	extents[0].length = 100;
	CHECK_EQ(refused(), 0);
	extents[0].memory = NULL;
	CHECK_EQ(refused(), -EFAULT);
	extents[0].memory = arena;
	extents[0].rows = 2;
	extents[0].memory_pitch = 99;
	extents[0].object_pitch = 100;
	CHECK_EQ(refused(), -EINVAL);
	extents[0].rows = 1ull << 62;
	extents[0].memory_pitch = extents[0].object_pitch = 1ull << 62;
	CHECK_EQ(refused(), -EOVERFLOW);
	extents[0].rows = 1;
	extents[0].offset = UINT64_MAX;
	CHECK_EQ(refused(), -EOVERFLOW);
	extents[0].offset = 0;
	extents[0].object = NULL;
	CHECK_EQ(refused(), -EINVAL);
	extents[0].object = &objects[0];
	wishes.write = true;
	CHECK_EQ(refused(), -EBADF);
	CHECK(strstr(refusal.message, "reading"));
	objects[0].mode = PEN_WRITE;
	CHECK_EQ(refused(), 0);
	objects[0].committed = true;
	CHECK_EQ(refused(), -EBADF);
	objects[0].committed = false;
	objects[1].mode = PEN_WRITE;
	objects[1].ops = &object_synth_ops;
	add(1, 0, 10, 1000);
	CHECK_EQ(refused(), -EINVAL);
}

TEST(a_written_object_of_unknown_size_may_grow)
{
	set_up(true, 4096, 4096, 0);
	objects[0].info.size = 0;
	add(0, 1ull << 40, 10000, 0);
	CHECK_EQ(refused(), 0);
	objects[0].info.size = 100;
	CHECK_EQ(refused(), -ERANGE);
}

TEST(a_million_rows_are_planned_quickly)
{
	struct pen_error err;
	struct plan *plan;

	/* The memory is never touched. */
	set_up(false, 4096, 1 << 20, 65536);
	objects[0].info.size = 1ull << 40;
	add_rows(0, 0, 16, 0, 1000000, 4096, 16);
	CHECK_EQ(plan_new(extents, 1, &wishes, &plan, &err), 0);
	CHECK_EQ(plan->bytes, 16000000);
	CHECK_EQ(plan->request_count, (1000000ull * 4096 + (1 << 20) - 1) >> 20);
	CHECK_EQ(plan->copy_count, plan->request_count);
	plan_free(plan);
}

TEST_ALONE(a_long_extent_over_many_short_ones_is_planned_quickly)
{
	const size_t count = 40000;
	struct pen_extent *many = calloc(count + 1, sizeof(*many));
	struct plan *plan;
	uint64_t begin;

	/* A whole file, and a small piece of each MiB of it once more. */
	set_up(false, 4096, 1 << 20, 65536);
	objects[0].info.size = 1ull << 40;
	many[0] = (struct pen_extent){ .object = &objects[0], .memory = (void *)(1ull << 30),
				       .length = count << 20 };
	for (size_t i = 0; i < count; i++)
		many[i + 1] = (struct pen_extent){ .object = &objects[0], .offset = i << 20,
			.memory = (void *)((1ull << 45) + i * 8192), .length = 4096 };
	begin = os_now();
	CHECK_EQ(plan_new(many, count + 1, &wishes, &plan, NULL), 0);
	CHECK_EQ(plan->request_count, count);
	printf("%.3f s\n", (double)(os_now() - begin) / 1e9);
	/* Sorting takes some 10 ms; looking at each pair of extents takes a second or more. */
	CHECK(TEST_SLOW_BUILD || os_now() - begin < 400000000);
	plan_free(plan);
	free(many);
}

/* A random set; memory never overlaps, and for writes neither do the objects. */
static void random_extents(bool write)
{
	static const uint64_t gaps[] = { 0, 64, 4096, 65536 };
	static const uint32_t aligns[] = { 0, 512, 4096 };
	uint64_t at = chance(100), used[OBJECTS] = { chance(5000), chance(9), 0 };
	uint64_t follow = 0;
	unsigned int count = chance(EXTENTS + 1);

	set_up(write, aligns[chance(3)], 512ull << chance(7), gaps[chance(4)]);
	wishes.straight = !chance(4);
	wishes.device = chance(2) ? &host : &gpus[0];
	for (unsigned int i = 0; i < count; i++) {
		int object = (int)chance(chance(2) ? OBJECTS : 1);
		uint64_t rows = chance(3) ? 1 : chance(9), length = chance(chance(3) ? 300 : 6000);
		uint64_t slack = chance(2) ? 0 : chance(700), pitch = length + slack, offset;
		uint64_t span = (rows ? rows - 1 : 0) * pitch + length;

		if (write)
			offset = used[object] + (chance(2) ? 0 : chance(3000));
		else
			offset = chance(3) ? chance(STORE) : follow;
		if (offset + span > STORE)
			continue;
		used[object] = follow = offset + span;
		if (write && !chance(4)) {
			add_fill(object, offset, span, chance(256));
			continue;
		}
		add_rows(object, offset, length, at, rows, pitch, length + (chance(2) ? 0 : slack));
		if (!chance(3))
			extents[extent_count - 1].device = chance(2) ? &host : &gpus[chance(2)];
		at += (rows ? rows : 1) * (length + slack) + (chance(2) ? 0 : chance(500));
		CHECK(at < ARENA);
		/* Contiguous memory, where the slack was not used, is wanted too. */
		if (rows <= 1)
			at -= slack;
	}
	for (size_t i = extent_count; i > 1; i--) {
		size_t other = chance((uint32_t)i);
		struct pen_extent swap = extents[i - 1];

		if (chance(2)) {
			extents[i - 1] = extents[other];
			extents[other] = swap;
		}
	}
}

static void random_plans(bool write)
{
	scramble(arena, ARENA);
	for (int i = 0; i < OBJECTS; i++)
		scramble(stores[i], STORE);
	for (int round = 0; round < 2000; round++) {
		seed = (uint64_t)round * 2 + write;
		random_extents(write);
		check_plan(make());
	}
}

TEST(random_reads_give_the_same_bytes_as_the_extents_one_by_one)
{
	random_plans(false);
}

TEST(random_writes_give_the_same_bytes_as_the_extents_one_by_one)
{
	random_plans(true);
}

/* Tensors one after the other, coded or plain, of which extents take runs of chunks; some overlap.
 * Whatever the unit: a chunk lies in one request, and each extent has each of its own once. */
TEST(coded_extents_are_cut_between_their_chunks)
{
	static struct planes_chunk chunks[2][64];
	static uint64_t offsets[2][64];
	const struct coding *codings[EXTENTS];
	struct coding tensors[2] = { { .kind = PLANES_BF16 }, { .kind = PLANES_F32 } };

	for (int round = 0; round < 300; round++) {
		uint64_t unit = PLAN_UNIT_CODED << chance(3), at = chance(1000) * 16, end;
		uint64_t had[EXTENTS][64] = { { 0 } }, last[EXTENTS];
		struct plan *plan;

		set_up(false, 4096, unit, 0);
		objects[0].info.size = 1u << 30;
		for (int t = 0; t < 2; t++) {
			for (int i = 0; i < 64; i++) {
				chunks[t][i].bytes = 16 * (1 + chance(t ? 4096 : 2048));
				offsets[t][i] = at;
				at += chunks[t][i].bytes;
			}
			at += 16 * chance(2000);
			tensors[t].chunks = chunks[t];
			tensors[t].offsets = offsets[t];
			tensors[t].values = 64 * PLANES_CHUNK;
			tensors[t].length = tensors[t].pitch = tensors[t].values;
			tensors[t].rows = 1;
		}
		for (int e = 0; e < 8; e++) {
			const struct coding *coding = e < 6 ? &tensors[e % 2] : NULL;
			uint32_t from = chance(64), to = from + chance(64 - from);
			uint64_t begin = offsets[e % 2][from];

			end = offsets[e % 2][to] + chunks[e % 2][to].bytes;
			add(0, begin, end - begin, 0);
			codings[e] = coding;
			last[e] = to;
		}
		wishes.codings = codings;
		plan = make();
		for (size_t r = 0; r < plan->request_count; r++) {
			const struct plan_request *request = &plan->requests[r];

			/* With the blocks around it. */
			CHECK((request->offset + request->length + 4095) / 4096 * 4096 -
			      request->offset / 4096 * 4096 <= unit);
			for (uint32_t c = 0; c < request->copy_count; c++) {
				const struct plan_copy *copy =
					&plan->copies[request->first_copy + c];
				const struct coding *coding = copy->coding;

				if (!coding)
					continue;
				CHECK_EQ(request->offset + copy->at, coding->offsets[copy->chunk]);
				CHECK_EQ(request->offset + copy->at + copy->width,
					 coding_chunk_end(coding, copy->chunk + copy->chunks - 1));
				for (uint64_t i = 0; i < copy->chunks; i++)
					had[coding == &tensors[1]][copy->chunk + i]++;
			}
		}
		for (int e = 0; e < 6; e++)
			for (uint64_t i = coding_chunk_at(codings[e], extents[e].offset);
			     i <= last[e]; i++)
				CHECK(had[e % 2][i]-- > 0);
		for (int t = 0; t < 2; t++)
			for (int i = 0; i < 64; i++)
				CHECK_EQ(had[t][i], 0);
		plan_free(plan);
	}
}

TEST_MAIN
