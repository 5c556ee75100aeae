/* SPDX-License-Identifier: MIT */
/* The pool of staging memory: budgets, pieces that are reused, slabs that are made as one. */
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include "mem/pool.h"
#include "sys/fault.h"
#include "test.h"

static struct pen_device *host;
static struct piece_budget budget;

static void open_host(int left)
{
	CHECK(!pen_device_open("host", &host, NULL));
	budget.piece_size = PIECE_SIZE;
	budget.left = left;
}

static struct piece *take_for(enum piece_need need)
{
	struct pen_error err;
	int rc = 1;
	struct piece *piece = piece_take(&budget, need, host, &rc, &err);

	CHECK_EQ(rc, 0);
	return piece;
}

static struct piece *take_piece(void)
{
	return take_for(PIECE_MORE);
}

TEST(a_budget_is_never_exceeded)
{
	struct piece *taken[3];

	open_host(3);
	for (int i = 0; i < 3; i++) {
		taken[i] = take_piece();
		CHECK(taken[i] && taken[i]->size == PIECE_SIZE);
		CHECK_EQ((uintptr_t)taken[i]->memory % (2u << 20), 0);
		memset(taken[i]->memory, i + 1, PIECE_SIZE);
	}
	CHECK(!take_piece());
	CHECK_EQ(budget.peak_bytes, 3 * PIECE_SIZE);
	piece_put(&budget, taken[1]);
	CHECK_EQ(budget.bytes, 2 * PIECE_SIZE);
	taken[1] = take_piece();
	CHECK(taken[1] && !take_piece());
	CHECK_EQ(budget.peak_bytes, 3 * PIECE_SIZE);
	for (int i = 0; i < 3; i++)
		piece_put(&budget, taken[i]);
	CHECK(budget.bytes == 0 && budget.left == 3);
	piece_trim(NULL);
	pen_device_close(host);
}

TEST(pieces_are_reused_and_trimmed)
{
	unsigned char *first;
	struct piece *piece;

	open_host(2);
	piece = take_piece();
	first = piece->memory;
	first[77] = 1;
	piece_put(&budget, piece);
	piece = take_piece();
	CHECK(piece->memory == first && first[77] == 1);
	piece_put(&budget, piece);
	pen_trim();
	piece = take_piece();
	CHECK_EQ(piece->memory[77], 0);
	piece_put(&budget, piece);
	pen_trim();
	pen_trim();
	pen_device_close(host);
}

TEST(pieces_of_another_size_are_not_confused)
{
	struct piece *large, *small;

	open_host(2);
	large = take_piece();
	piece_put(&budget, large);
	budget.piece_size = 64 << 10;
	small = take_piece();
	CHECK_EQ(small->size, 64 << 10);
	memset(small->memory, 1, small->size);
	piece_put(&budget, small);
	piece_trim(NULL);
	pen_device_close(host);
}

static void keep_together(int count)
{
	budget.together = count;
	budget.kept = count;
}

static struct piece *take_together(void)
{
	return take_for(PIECE_TOGETHER);
}

/* What lanes take at the start is one mapping, gone when none of it is out. */
TEST(pieces_made_together_lie_together)
{
	struct piece *taken[6];

	open_host(6);
	keep_together(4);
	for (int i = 0; i < 4; i++) {
		taken[i] = take_together();
		memset(taken[i]->memory, i, PIECE_SIZE);
		CHECK_EQ(budget.together, 3 - i);
		CHECK_EQ(budget.kept, 3 - i);
		CHECK(taken[i]->memory == taken[0]->memory + (size_t)i * PIECE_SIZE);
	}
	for (int i = 4; i < 6; i++) {
		taken[i] = take_piece();
		CHECK(taken[i]->slab != taken[0]->slab);
	}
	for (int i = 0; i < 5; i++)
		piece_put(&budget, taken[i == 3 ? 5 : i]);
	piece_trim(NULL);
	/* One of the four is still out. */
	for (size_t at = 0; at < PIECE_SIZE; at++)
		CHECK_EQ(taken[3]->memory[at], 3);
	piece_put(&budget, taken[3]);
	piece_trim(NULL);
	pen_device_close(host);
}

/* A lane that found no work gives its pieces back before another has taken its own. */
TEST(each_piece_of_a_slab_is_taken_once_before_any_is_twice)
{
	struct piece *taken[4], *other;

	open_host(8);
	keep_together(4);
	taken[0] = take_together();
	taken[1] = take_together();
	piece_put(&budget, taken[0]);
	/* Nor is it for those who ask for one more, or for another job. */
	other = take_piece();
	CHECK(other->slab != taken[1]->slab);
	taken[2] = take_together();
	taken[3] = take_together();
	CHECK(taken[2] != taken[0] && taken[3] != taken[0]);
	CHECK(taken[2]->slab == taken[1]->slab && taken[3]->slab == taken[1]->slab);
	CHECK(take_piece() == taken[0]);
	for (int i = 0; i < 4; i++)
		piece_put(&budget, taken[i]);
	piece_put(&budget, other);
	piece_trim(NULL);
	pen_device_close(host);
}

/* Somebody ate what was kept: nobody waits for the rest of the slab, and others may have it. */
TEST(a_slab_that_will_not_be_complete_is_given_up)
{
	struct piece *taken[3], *left;

	open_host(4);
	keep_together(4);
	for (int i = 0; i < 3; i++)
		taken[i] = take_together();
	budget.left = 0;
	CHECK(!take_together() && !budget.together);
	budget.left = 1;
	budget.kept = 0;
	left = take_piece();
	CHECK(left && left->slab == taken[0]->slab);
	for (int i = 0; i < 3; i++)
		piece_put(&budget, taken[i]);
	piece_put(&budget, left);
	piece_trim(NULL);
	pen_device_close(host);
}

TEST(what_is_idle_is_taken_before_a_slab_is_made)
{
	struct piece *idle[2], *taken[5];

	open_host(8);
	idle[0] = take_piece();
	idle[1] = take_piece();
	piece_put(&budget, idle[0]);
	piece_put(&budget, idle[1]);
	keep_together(5);
	for (int i = 0; i < 5; i++)
		taken[i] = take_together();
	CHECK(taken[0] == idle[0] || taken[0] == idle[1]);
	CHECK((taken[1] == idle[0] || taken[1] == idle[1]) && taken[1] != taken[0]);
	CHECK(taken[2]->slab == taken[3]->slab && taken[3]->slab == taken[4]->slab);
	for (int i = 0; i < 5; i++)
		piece_put(&budget, taken[i]);
	piece_trim(NULL);
	pen_device_close(host);
}

static int mmaps_to_fail;

static int fail_mmap(const char *name)
{
	return !strcmp(name, "mmap") && mmaps_to_fail && mmaps_to_fail-- ? ENOMEM : 0;
}

TEST(where_much_is_not_to_be_had_one_piece_is)
{
	struct pen_error err;
	struct piece *piece;
	int rc;

	open_host(8);
	keep_together(8);
	sys_fault_hook = fail_mmap;
	mmaps_to_fail = 1;
	piece = take_together();
	CHECK(piece && !mmaps_to_fail);
	memset(piece->memory, 1, PIECE_SIZE);
	mmaps_to_fail = 2;
	CHECK(!piece_take(&budget, PIECE_TOGETHER, host, &rc, &err) && rc == -ENOMEM);
	CHECK(!mmaps_to_fail && budget.left == 7);
	sys_fault_hook = NULL;
	piece_put(&budget, piece);
	piece_trim(NULL);
	pen_device_close(host);
}

/* Too much is idle: what is dear to make stays. And no slab is larger than what is kept. */
TEST(the_pool_keeps_no_more_than_a_job_may_use)
{
	enum { COUNT = 44, SLAB = 40, KEPT = (128 << 20) / PIECE_SIZE };
	struct piece *taken[COUNT];
	unsigned char *where[COUNT], present;
	int mapped = 0;

	open_host(COUNT);
	keep_together(SLAB);
	for (int i = 0; i < COUNT; i++) {
		taken[i] = i < SLAB ? take_together() : take_piece();
		where[i] = taken[i]->memory;
	}
	CHECK(taken[KEPT - 1]->slab == taken[0]->slab && taken[KEPT]->slab != taken[0]->slab);
	for (int i = 0; i < COUNT; i++)
		piece_put(&budget, taken[(i + 20) % COUNT]);
	for (int i = 0; i < COUNT; i++)
		mapped += !mincore(where[i], 4096, &present);
	CHECK_EQ(mapped, KEPT);
	CHECK(!mincore(where[0], 4096, &present) && !mincore(where[KEPT - 1], 4096, &present));
	piece_trim(NULL);
	for (int i = 0; i < COUNT; i++)
		CHECK(mincore(where[i], 4096, &present) < 0);
	CHECK(budget.left == COUNT && !budget.bytes);
	pen_device_close(host);
}

TEST(slabs_of_another_size_are_not_kept)
{
	struct piece *taken[3];
	unsigned char *where, present;

	open_host(3);
	budget.piece_size = 64 << 10;
	keep_together(3);
	for (int i = 0; i < 3; i++)
		taken[i] = take_together();
	where = taken[0]->memory;
	piece_put(&budget, taken[0]);
	piece_put(&budget, taken[2]);
	CHECK(!mincore(where, 4096, &present));
	memset(taken[1]->memory, 1, taken[1]->size);
	piece_put(&budget, taken[1]);
	CHECK(mincore(where, 4096, &present) < 0);
	pen_device_close(host);
}

/* What a job that gathers left is for the next of its kind, whatever others put back. */
TEST(pieces_of_jobs_that_gather_are_kept_for_the_next_of_them)
{
	enum { COUNT = 40 };	/* more than is kept of any other job */
	struct piece_budget other = { .piece_size = PIECE_SIZE, .left = 1 };
	struct piece *taken[COUNT], *piece;
	struct pen_error err;
	int rc;

	open_host(COUNT);
	budget.gathers = true;
	for (int i = 0; i < COUNT; i++)
		taken[i] = take_piece();
	for (int i = 0; i < COUNT; i++)
		piece_put(&budget, taken[i]);
	CHECK_EQ(piece_kept(), COUNT * PIECE_SIZE);
	piece = piece_take(&other, PIECE_MORE, host, &rc, &err);
	CHECK(piece && other.made_bytes == PIECE_SIZE);
	piece_put(&other, piece);
	CHECK_EQ(piece_kept(), COUNT * PIECE_SIZE);
	for (int i = 0; i < COUNT; i++)
		taken[i] = take_piece();
	CHECK_EQ(budget.made_bytes, COUNT * PIECE_SIZE);
	for (int i = 0; i < COUNT; i++)
		piece_put(&budget, taken[i]);
	/* One that needs less leaves little more than that. */
	budget.peak_bytes = 0;
	piece_put(&budget, take_piece());
	CHECK_EQ(piece_kept(), PIECE_SIZE);
	piece_trim(NULL);
	CHECK_EQ(piece_kept(), 0);
	pen_device_close(host);
}

/* Pieces of another size make way as new ones are made. */
TEST(what_another_limit_left_makes_way)
{
	struct piece *taken[4];

	open_host(4);
	budget.gathers = true;
	for (int i = 0; i < 4; i++)
		taken[i] = take_piece();
	for (int i = 0; i < 4; i++)
		piece_put(&budget, taken[i]);
	budget.piece_size = 64 << 10;
	for (int i = 0; i < 3; i++)
		taken[i] = take_piece();
	CHECK_EQ(piece_kept(), PIECE_SIZE);
	for (int i = 0; i < 3; i++)
		piece_put(&budget, taken[i]);
	piece_trim(NULL);
	pen_device_close(host);
}

static void *churn(void *unused)
{
	(void)unused;
	for (int i = 0; i < 200; i++) {
		struct piece *piece = take_piece();

		CHECK(budget.bytes <= 3 * PIECE_SIZE);
		if (piece) {
			piece->memory[0]++;
			piece_put(&budget, piece);
		}
	}
	return NULL;
}

TEST(threads_share_a_budget)
{
	pthread_t threads[6];

	open_host(3);
	for (int i = 0; i < 6; i++)
		CHECK(!pthread_create(&threads[i], NULL, churn, NULL));
	for (int i = 0; i < 6; i++)
		pthread_join(threads[i], NULL);
	CHECK(budget.left == 3 && budget.bytes == 0 && budget.peak_bytes <= 3 * PIECE_SIZE);
	piece_trim(NULL);
	pen_device_close(host);
}

TEST_MAIN
