/* SPDX-License-Identifier: MIT */
#ifndef MEM_RING_H
#define MEM_RING_H
/*
 * Staging memory. The process keeps a pool of pieces: equal blocks of huge-page memory, registered
 * once with the device they serve and then reused by job after job. What a job's lanes need from
 * the start is made as one slab: that takes half the time of making it piece by piece, or less, and
 * a registration holds up everybody's copies. A lane's ring is a few pieces; a slot is the lowest
 * free stretch that fits, so light use stays in a few hot megabytes, and it never crosses a piece,
 * so it never straddles two registrations.
 *
 *   FREE --ring_take--> FILLING or COPYING (the lane says who owns it) --ring_put--> FREE
 *
 * Invariants
 *   1. A slot is FREE only when the kernel and the GPU have both let go of it.
 *   2. Slots that are not FREE do not overlap.
 *   3. Pieces out in jobs never exceed the jobs' promises: a budget is asked before each piece.
 *   4. All pieces of a slab serve one device; it is unmapped when none of them is out.
 *   5. Pieces belong to one process: a forked child has none of them and starts a pool of its own.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "mem/device.h"

#define PIECE_SIZE ((size_t)4 << 20)

struct slab;

struct piece {
	unsigned char *memory;
	size_t size;
	struct slab *slab;		/* what it was made with */
	bool idle, touched;
	bool pinned;			/* by itself, where the slab was refused */
};

/* What a job may still take; shared by its lanes. */
struct piece_budget {
	atomic_int left;		/* pieces */
	atomic_int kept;		/* of these, for lanes that have not taken theirs */
	int together;			/* of these, to be made as one; under the pool's lock */
	_Atomic uint64_t bytes, peak_bytes;	/* pinned now, pieces and others, and most ever */
	size_t piece_size;
};

/* Memory of another kind that counts against the promise: bytes more, or less. */
void budget_count(struct piece_budget *budget, int64_t bytes);

/* What a lane asks for: one of those it takes at the start with all others, its first one, both
 * kept for it; or one more. */
enum piece_need { PIECE_TOGETHER, PIECE_FIRST, PIECE_MORE };

/* A piece within the budget, from the pool or new, touched; NULL with *rc 0 where the budget is
 * spent, NULL with a negative errno where memory is. */
struct piece *piece_take(struct piece_budget *budget, enum piece_need need,
			 struct pen_device *device, int *rc, struct pen_error *err);
/* Register it, and what was made with it, with the device it was taken for. -EAGAIN: another lane
 * is at it, or still touches what was made with it: the driver would bring in those pages one by
 * one, in everybody's way. Memory that the device refuses can be copied from as it is, only slower.
 * Lane's thread, after device_enter(). */
int piece_pin(struct piece *piece, struct pen_error *err);
void piece_put(struct piece_budget *budget, struct piece *piece);
/* Free what is idle and was made for `device`; NULL: for any. */
void piece_trim(struct pen_device *device);

enum slot_state { SLOT_FREE, SLOT_FILLING, SLOT_COPYING };

struct slot {
	enum slot_state state;
	unsigned char *memory;		/* NULL: the slot needs no ring memory (placed, lent) */
	unsigned int piece;		/* index in the ring */
	size_t at, size;		/* place in the piece */
};

#define RING_SLOTS 64
#define RING_PIECES 64

struct ring {
	struct piece *pieces[RING_PIECES];
	unsigned int piece_count;
	struct slot slots[RING_SLOTS];
	unsigned int used;		/* slots that are not FREE */
};

/* A slot of `size` bytes (0: only the bookkeeping), in `state`; NULL where there is no room now. */
struct slot *ring_take(struct ring *ring, size_t size, enum slot_state state);
void ring_put(struct ring *ring, struct slot *slot);

/* One more piece gives room at once, for what fits into a piece. */
bool ring_can_grow(const struct ring *ring);
void ring_add(struct ring *ring, struct piece *piece);

#endif
