/* SPDX-License-Identifier: MIT */
/* Staging memory: the pool of pieces, and the ring of one lane; see ring.h. */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "mem/ring.h"
#include "sys/os.h"

/* Idle pieces kept for the next job; more than the default promise of one job would be greed. */
#define POOL_KEEP ((size_t)128 << 20)

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static struct piece *pool;	/* guarded by pool_lock, as is pool_bytes */
static size_t pool_bytes;

/* Pieces are not inherited: a child has only the words about them, and nothing to unpin. */
static void forget_pool(void)
{
	while (pool) {
		struct piece *piece = pool;

		pool = piece->next;
		free(piece);
	}
	pool_bytes = 0;
}

__attribute__((constructor)) static void mind_forks(void)
{
	os_at_fork(OS_FORK_POOL, &pool_lock, forget_pool);
}

void budget_count(struct piece_budget *budget, int64_t bytes)
{
	uint64_t now = atomic_fetch_add(&budget->bytes, (uint64_t)bytes) + (uint64_t)bytes;
	uint64_t peak = atomic_load(&budget->peak_bytes);

	while (bytes > 0 && now > peak &&
	       !atomic_compare_exchange_weak(&budget->peak_bytes, &peak, now))
		;
}

static bool budget_take(struct piece_budget *budget, bool first)
{
	int left = atomic_load(&budget->left);

	do {
		if (left <= (first ? 0 : atomic_load(&budget->kept)))
			return false;
	} while (!atomic_compare_exchange_weak(&budget->left, &left, left - 1));
	if (first)
		atomic_fetch_sub(&budget->kept, 1);
	budget_count(budget, (int64_t)budget->piece_size);
	return true;
}

static void budget_put(struct piece_budget *budget)
{
	budget_count(budget, -(int64_t)budget->piece_size);
	atomic_fetch_add(&budget->left, 1);
}

/* A pooled piece that fits: one this device has pinned already, else one nobody has. */
static struct piece *pool_find(size_t size, int node, struct pen_device *device)
{
	struct piece **link, **found = NULL, *piece = NULL;

	pthread_mutex_lock(&pool_lock);
	for (link = &pool; *link; link = &(*link)->next) {
		if ((*link)->size != size || (*link)->node != node)
			continue;
		if ((*link)->pinned_by == device) {
			found = link;
			break;
		}
		if (!(*link)->pinned_by && !found)
			found = link;
	}
	if (found) {
		piece = *found;
		*found = piece->next;
		pool_bytes -= piece->size;
	}
	pthread_mutex_unlock(&pool_lock);
	return piece;
}

static void piece_free(struct piece *piece)
{
	if (piece->pinned_by)
		device_unpin(piece->pinned_by, piece->memory, NULL);
	os_unmap(piece->memory, piece->size);
	free(piece);
}

static struct piece *piece_new(size_t size, int node)
{
	struct piece *piece = os_calloc(1, sizeof(*piece));
	void *memory;

	if (!piece)
		return NULL;
	if (os_map_huge(size, node, &memory)) {
		free(piece);
		return NULL;
	}
	os_not_inherited(memory, size);
	piece->memory = memory;
	piece->size = size;
	piece->node = node;
	/* Touched here, by the lane that will use it, so that lanes do it in parallel. */
	for (size_t at = 0; at < size; at += os_page_size())
		piece->memory[at] = 0;
	return piece;
}

struct piece *piece_take(struct piece_budget *budget, bool first, struct pen_device *device,
			 int *rc, struct pen_error *err)
{
	struct piece *piece;

	*rc = 0;
	if (!budget_take(budget, first))
		return NULL;
	piece = pool_find(budget->piece_size, device_node(device), device);
	if (!piece)
		piece = piece_new(budget->piece_size, device_node(device));
	if (!piece) {
		budget_put(budget);
		*rc = error_sys(err, -ENOMEM, "allocate staging memory for", device->name, -1);
		error_hint(err, "Lower the memory limit");
	}
	return piece;
}

int piece_pin(struct piece *piece, struct pen_device *device, struct pen_error *err)
{
	int rc;

	if (piece->pinned_by == device || device->is_host)
		return 0;
	assert(!piece->pinned_by);
	rc = device_pin(device, piece->memory, piece->size, false, err);
	if (!rc)
		piece->pinned_by = device;
	return rc;
}

void piece_put(struct piece_budget *budget, struct piece *piece)
{
	budget_put(budget);
	pthread_mutex_lock(&pool_lock);
	if (piece->size == PIECE_SIZE && pool_bytes + piece->size <= POOL_KEEP) {
		piece->next = pool;
		pool = piece;
		pool_bytes += piece->size;
		piece = NULL;
	}
	pthread_mutex_unlock(&pool_lock);
	if (piece)
		piece_free(piece);
}

void piece_trim(struct pen_device *device)
{
	struct piece **link;

	/* All under the lock: a device that pinned a piece cannot be closed until it is free. */
	pthread_mutex_lock(&pool_lock);
	for (link = &pool; *link;) {
		struct piece *piece = *link;

		if (device && piece->pinned_by != device) {
			link = &piece->next;
			continue;
		}
		*link = piece->next;
		pool_bytes -= piece->size;
		piece_free(piece);
	}
	pthread_mutex_unlock(&pool_lock);
}

/* The slot that stands in the way of [at, at + size) of a piece, or NULL. Few are ever out. */
static const struct slot *in_the_way(const struct ring *ring, unsigned int piece, size_t at,
				     size_t size)
{
	for (unsigned int i = 0; i < RING_SLOTS; i++) {
		const struct slot *slot = &ring->slots[i];

		if (slot->state != SLOT_FREE && slot->memory && slot->piece == piece &&
		    slot->at < at + size && at < slot->at + slot->size)
			return slot;
	}
	return NULL;
}

/* The lowest free stretch of `size` bytes. */
static bool find_room(const struct ring *ring, size_t size, unsigned int *piece, size_t *at)
{
	for (*piece = 0; *piece < ring->piece_count; ++*piece) {
		const struct slot *slot;

		*at = 0;
		while (size <= ring->pieces[*piece]->size - *at) {
			slot = in_the_way(ring, *piece, *at, size);
			if (!slot)
				return true;
			*at = slot->at + slot->size;
		}
	}
	return false;
}

struct slot *ring_take(struct ring *ring, size_t size, enum slot_state state)
{
	struct slot *slot = ring->slots;
	unsigned int piece = 0;
	size_t at = 0;

	assert(state != SLOT_FREE);
	if (ring->used == RING_SLOTS || (size && !find_room(ring, size, &piece, &at)))
		return NULL;
	while (slot->state != SLOT_FREE)
		slot++;
	slot->state = state;
	slot->size = size;
	slot->piece = piece;
	slot->at = at;
	slot->memory = size ? ring->pieces[piece]->memory + at : NULL;
	ring->used++;
	return slot;
}

void ring_put(struct ring *ring, struct slot *slot)
{
	assert(slot->state != SLOT_FREE);
	slot->state = SLOT_FREE;
	ring->used--;
}

bool ring_can_grow(const struct ring *ring)
{
	return ring->piece_count < RING_PIECES;
}

void ring_add(struct ring *ring, struct piece *piece)
{
	assert(ring->piece_count < RING_PIECES);
	ring->pieces[ring->piece_count++] = piece;
}
