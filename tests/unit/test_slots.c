/* SPDX-License-Identifier: MIT */
/*
 * The staging memory of one lane. A shadow keeps what is out and asks of each new slot: does it lie
 * in a piece, and does it keep clear of every other that is out? Sizes are in pages.
 */
#include "mem/staging.h"
#include "sys/os.h"
#include "test.h"

#define PIECES 6
#define ROOM 1000
#define SLOTS STAGING_SLOTS

static struct staging staging;
static struct piece pieces[PIECES];
static unsigned char *memory[PIECES];
static uint64_t seed = 1;

/* The shadow: the slots that are out, in the order they were taken. */
static struct shadow {
	struct slot *slot;
	unsigned char *memory;
	size_t size;
} shadow[SLOTS];
static unsigned int out;

static uint32_t chance(uint32_t below)
{
	seed = seed * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(seed >> 33) % below;
}

static void add_piece(void)
{
	struct piece *piece = &pieces[staging.piece_count];

	if (!memory[staging.piece_count])
		memory[staging.piece_count] = malloc(ROOM * os_page_size());
	CHECK(memory[staging.piece_count] != NULL);
	piece->memory = memory[staging.piece_count];
	piece->size = ROOM * os_page_size();
	staging_add(&staging, piece);
}

/* What a test begins with; the pieces of the one before are not given back, they are nobody's. */
static void set_up(void)
{
	while (staging_remove(&staging))
		;
	if (staging.slots)
		staging_fini(&staging);
	memset(&staging, 0, sizeof(staging));
	CHECK_EQ(staging_init(&staging, SLOTS, PIECES), 0);
}

static void check_slot(const struct slot *slot, size_t pages)
{
	size_t size = pages * os_page_size();

	CHECK_EQ(slot->size, size);
	CHECK(slot->taken);
	if (!size) {
		CHECK(!slot->memory);
		return;
	}
	CHECK(slot->piece < staging.piece_count);
	CHECK(slot->memory == memory[slot->piece] + slot->at);
	CHECK(slot->at + size <= ROOM * os_page_size());
	CHECK_EQ(slot->at % os_page_size(), 0);
	for (unsigned int i = 0; i < out; i++)
		if (shadow[i].size)
			CHECK(slot->memory + size <= shadow[i].memory ||
			      shadow[i].memory + shadow[i].size <= slot->memory);
}

static struct slot *take(size_t size)
{
	struct slot *slot = staging_take(&staging, size * os_page_size());

	if (!slot)
		return NULL;
	check_slot(slot, size);
	for (unsigned int i = 0; i < out; i++)
		CHECK(shadow[i].slot != slot);
	shadow[out++] = (struct shadow){ slot, slot->memory, size * os_page_size() };
	return slot;
}

static void put(unsigned int index)
{
	staging_put(&staging, shadow[index].slot);
	out--;
	memmove(shadow + index, shadow + index + 1, (out - index) * sizeof(shadow[0]));
	CHECK_EQ(staging.used, out);
}

/* The numbers of the slots in use are found one after the other. */
static void check_numbers(void)
{
	unsigned int found = 0, last = 0;

	for (unsigned int i = staging_next(&staging, 0); i < SLOTS;
	     i = staging_next(&staging, i + 1)) {
		CHECK(!found++ || i > last);
		CHECK(staging.slots[i].taken);
		last = i;
	}
	CHECK_EQ(found, out);
}

static void put_all(void)
{
	while (out)
		put(chance(out));
}

TEST(without_pieces_there_is_no_room)
{
	set_up();
	CHECK(!take(1));
	CHECK(staging_can_grow(&staging));
	CHECK(take(0) != NULL);
	put_all();
}

TEST(slots_never_overlap_whatever_the_order)
{
	for (int round = 0; round < 300; round++) {
		set_up();
		seed = (uint64_t)round;
		add_piece();
		for (int step = 0; step < 400; step++) {
			if (chance(20) == 0 && staging.piece_count < PIECES)
				add_piece();
			if (chance(5) < 3) {
				take(chance(8) ? chance(400) + 1 : chance(ROOM + 1));
			} else if (out) {
				put(chance(3) ? 0 : chance(out));
			}
			check_numbers();
		}
		put_all();
	}
}

TEST(empty_staging_starts_again_at_its_first_byte)
{
	struct slot *slot;

	set_up();
	add_piece();
	add_piece();
	for (int round = 0; round < 50; round++) {
		for (unsigned int n = chance(6); n; n--)
			take(chance(700) + 1);
		put_all();
		slot = take(chance(ROOM) + 1);
		CHECK(slot && slot->memory == memory[0]);
		put_all();
	}
}

TEST(the_lowest_free_stretch_is_taken)
{
	struct slot *slot;

	set_up();
	add_piece();
	add_piece();
	CHECK(take(400) && take(400) && take(400));
	put(1);
	slot = take(300);
	CHECK(slot && slot->piece == 0 && slot->at == 400 * os_page_size());
	slot = take(300);
	CHECK(slot && slot->piece == 0 && slot->at == 700 * os_page_size());
	slot = take(301);
	CHECK(slot && slot->piece == 1 && slot->at == 400 * os_page_size());
	put(0);
	slot = take(1);
	CHECK(slot && slot->piece == 0 && slot->at == 0 * os_page_size());
	put_all();
}

TEST(a_slot_never_crosses_a_piece)
{
	struct slot *slot;

	set_up();
	add_piece();
	add_piece();
	CHECK(take(600) != NULL);
	slot = take(600);
	CHECK(slot && slot->piece == 1 && slot->at == 0 * os_page_size());
	CHECK(!take(600));
	CHECK(take(400) != NULL);
	put_all();
	CHECK(!take(ROOM + 1));
}

TEST(every_byte_of_every_piece_can_be_out_at_once)
{
	set_up();
	for (int i = 0; i < PIECES; i++)
		add_piece();
	for (int i = 0; i < PIECES * 4; i++)
		CHECK(take(ROOM / 4) != NULL);
	CHECK(!take(1));
	put_all();
}

TEST(there_are_no_more_slots_than_slots)
{
	set_up();
	add_piece();
	for (unsigned int i = 0; i < SLOTS; i++)
		CHECK(take(1) != NULL);
	CHECK(!take(1) && !take(0));
	put(0);
	CHECK(take(1) != NULL);
	put_all();
}

TEST(growing_gives_room_at_once_when_it_says_so)
{
	for (int round = 0; round < 500; round++) {
		set_up();
		seed = (uint64_t)round;
		add_piece();
		while (staging.piece_count < PIECES) {
			size_t size = chance(600) + 1;

			if (!take(size) && staging.used < SLOTS && staging_can_grow(&staging)) {
				add_piece();
				CHECK(take(size) != NULL);
			}
			if (out && !chance(3))
				put(0);
			if (!chance(100))
				break;
		}
		put_all();
	}
}

TEST(slots_without_memory_take_no_room)
{
	set_up();
	add_piece();
	CHECK(take(0) != NULL);
	CHECK(take(600) != NULL);
	CHECK(take(0) != NULL);
	CHECK(take(400) != NULL);
	put_all();
	/* An oldest slot without memory must not stand in the way where staging stopped last. */
	CHECK(take(300) != NULL);
	put_all();
	CHECK(take(0) != NULL);
	CHECK(take(ROOM) != NULL);
	put_all();
}

TEST(mixed_slots_never_overlap)
{
	for (int round = 0; round < 300; round++) {
		set_up();
		seed = (uint64_t)round;
		add_piece();
		add_piece();
		for (int step = 0; step < 400; step++) {
			if (chance(5) < 3) {
				take(chance(2) ? chance(400) + 1 : 0);
			} else if (out) {
				put(chance(out));
			}
		}
		put_all();
	}
}

TEST(what_no_slot_has_had_is_found_in_the_last_piece_alone)
{
	const size_t page = os_page_size();
	struct slot *first, *second;

	set_up();
	CHECK(!staging_take_unused(&staging, 1));
	add_piece();
	first = staging_take_unused(&staging, 600 * page);
	CHECK_EQ(first->at, 0);
	staging_put(&staging, first);
	second = staging_take_unused(&staging, 300 * page);
	CHECK_EQ(second->at, 600 * page);
	CHECK(!staging_take_unused(&staging, 101 * page));
	add_piece();
	/* Found again by who does not mind. */
	first = staging_take(&staging, 600 * page);
	CHECK(first->piece == 0 && first->at == 0);
	staging_put(&staging, first);
	first = staging_take_unused(&staging, 50 * page);
	CHECK(first->piece == 1 && first->at == 0);
	staging_put(&staging, first);
	staging_put(&staging, second);
}

TEST(thousands_of_slots_fill_many_pieces)
{
	enum { MANY = 8192 };
	static struct slot *slots[MANY];
	struct piece piece = { .memory = malloc(64 * os_page_size()),
			       .size = 64 * os_page_size() };
	unsigned int count = 0;

	CHECK_EQ(staging_init(&staging, MANY, MANY / 64), 0);
	for (int i = 0; i < MANY / 64; i++)
		staging_add(&staging, &piece);
	CHECK(!staging_can_grow(&staging));
	while ((slots[count] = staging_take(&staging, 1)) != NULL && ++count < MANY)
		;
	CHECK_EQ(count, MANY);
	CHECK(!staging_take(&staging, 0));
	for (unsigned int i = 0; i < MANY; i += 2)
		staging_put(&staging, slots[i]);
	CHECK_EQ(staging_next(&staging, 0), 1);
	CHECK_EQ(staging_next(&staging, MANY - 1), MANY - 1);
	for (unsigned int i = 1; i < MANY; i += 2)
		staging_put(&staging, slots[i]);
	CHECK_EQ(staging_next(&staging, 0), MANY);
	while (staging_remove(&staging))
		;
	staging_fini(&staging);
	free(piece.memory);
}

TEST_MAIN
