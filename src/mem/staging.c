/* SPDX-License-Identifier: MIT */
/* The staging memory of one lane; see staging.h. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include "mem/staging.h"
#include "sys/os.h"

int staging_init(struct staging *staging, unsigned int slots, unsigned int pieces)
{
	assert(slots);
	staging->slots = os_calloc(slots, sizeof(staging->slots[0]));
	staging->busy = os_calloc(slots / 64 + 1, sizeof(staging->busy[0]));
	staging->pieces = os_calloc(pieces, sizeof(staging->pieces[0]));
	if (!staging->slots || !staging->busy || !staging->pieces) {
		staging_fini(staging);
		return -ENOMEM;
	}
	staging->slot_count = slots;
	staging->piece_room = pieces;
	return 0;
}

void staging_fini(struct staging *staging)
{
	assert(!staging->used && !staging->piece_count);
	free(staging->slots);
	free(staging->busy);
	free(staging->pieces);
	staging->slots = NULL;
	staging->busy = NULL;
	staging->pieces = NULL;
}

/* The lowest free stretch of `size` bytes of a piece, not below *at, which becomes its place; and
 * the link that a slot there hangs on. NULL where there is none. */
static struct slot **find_gap(struct staged_piece *piece, size_t size, size_t *at)
{
	struct slot **link = &piece->first;

	if (size > piece->free)
		return NULL;
	while (*link && (*link)->at < *at + size) {
		if ((*link)->at + (*link)->size > *at)
			*at = (*link)->at + (*link)->size;
		link = &(*link)->next;
	}
	return size <= piece->piece->size - *at ? link : NULL;
}

static unsigned int first_free(const struct staging *staging)
{
	for (unsigned int word = 0;; word++)
		if (~staging->busy[word])
			return word * 64 + (unsigned int)__builtin_ctzll(~staging->busy[word]);
}

/* From this piece on, and wherever in it, or only where no slot has been yet. */
static struct slot *take_from(struct staging *staging, unsigned int piece, size_t size,
			      bool unused)
{
	struct staged_piece *staged = NULL;
	struct slot **link = NULL, *slot;
	unsigned int number;
	size_t at = 0;

	if (staging->used == staging->slot_count)
		return NULL;
	size = (size + os_page_size() - 1) / os_page_size() * os_page_size();
	for (; size && !link && piece < staging->piece_count; piece++) {
		staged = &staging->pieces[piece];
		at = unused ? staged->unused : 0;
		link = find_gap(staged, size, &at);
	}
	if (size && !link)
		return NULL;
	number = first_free(staging);
	slot = &staging->slots[number];
	*slot = (struct slot){ .taken = true, .at = at, .size = size };
	if (size) {
		slot->piece = piece - 1;
		slot->memory = staged->piece->memory + at;
		slot->next = *link;
		*link = slot;
		staged->free -= size;
		if (staged->unused < at + size)
			staged->unused = at + size;
	}
	staging->busy[number / 64] |= 1ull << number % 64;
	staging->used++;
	return slot;
}

struct slot *staging_take(struct staging *staging, size_t size)
{
	return take_from(staging, 0, size, false);
}

struct slot *staging_take_unused(struct staging *staging, size_t size)
{
	return take_from(staging, staging->piece_count ? staging->piece_count - 1 : 0, size, true);
}

void staging_put(struct staging *staging, struct slot *slot)
{
	unsigned int number = (unsigned int)(slot - staging->slots);
	struct staged_piece *piece = &staging->pieces[slot->piece];
	struct slot **link = &piece->first;

	assert(slot->taken);
	if (slot->memory) {
		while (*link != slot)
			link = &(*link)->next;
		*link = slot->next;
		piece->free += slot->size;
	}
	slot->taken = false;
	staging->busy[number / 64] &= ~(1ull << number % 64);
	staging->used--;
}

unsigned int staging_next(const struct staging *staging, unsigned int from)
{
	while (from < staging->slot_count) {
		uint64_t rest = staging->busy[from / 64] >> from % 64;

		if (rest)
			return from + (unsigned int)__builtin_ctzll(rest);
		from = (from / 64 + 1) * 64;
	}
	return staging->slot_count;
}

bool staging_can_grow(const struct staging *staging)
{
	return staging->piece_count < staging->piece_room;
}

void staging_add(struct staging *staging, struct piece *piece)
{
	assert(staging_can_grow(staging));
	staging->pieces[staging->piece_count++] =
		(struct staged_piece){ .piece = piece, .free = piece->size };
}

struct piece *staging_remove(struct staging *staging)
{
	return staging->piece_count ? staging->pieces[--staging->piece_count].piece : NULL;
}
