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

/* Idle memory kept for the next job; more than the default promise of one job would be greed. */
#define POOL_KEEP ((size_t)128 << 20)

enum { UNPINNED, PINNED, REFUSED };

/* Pieces that were made together: one mapping, one registration. */
struct slab {
	struct slab *next;		/* in the pool */
	unsigned char *memory;
	size_t piece_size;
	int node;			/* wished NUMA node */
	struct pen_device *owner;	/* whose copies it is for; NULL: any of the host */
	unsigned int count, idle;	/* pieces, and how many nobody has */
	pthread_mutex_t pin_lock;	/* held by who registers it */
	atomic_int state;
	struct piece pieces[];
};

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
/* All slabs, and the bytes of their idle pieces; guarded by pool_lock, as is what changes in them,
 * `state` apart. */
static struct slab *pool;
static size_t idle_bytes;

static size_t slab_size(const struct slab *slab)
{
	return slab->count * slab->piece_size;
}

/* Slabs are not inherited: a child has only the words about them, and nothing to unpin. Where
 * pieces are out the words stay, for whoever looks at a job of the parent's. */
static void forget_pool(void)
{
	while (pool) {
		struct slab *slab = pool;

		pool = slab->next;
		if (slab->idle == slab->count)
			free(slab);
	}
	idle_bytes = 0;
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

/* Take an idle piece out of a slab that has one. */
static struct piece *slab_take(struct slab *slab)
{
	struct piece *piece = slab->pieces;

	while (!piece->idle)
		piece++;
	piece->idle = false;
	slab->idle--;
	idle_bytes -= piece->size;
	return piece;
}

/* An idle piece that fits: of this owner's, else of a slab that nobody uses and owns. */
static struct piece *pool_find(size_t size, int node, struct pen_device *owner)
{
	struct slab *slab, *found = NULL;

	for (slab = pool; slab; slab = slab->next) {
		if (!slab->idle || slab->piece_size != size || slab->node != node)
			continue;
		if (slab->owner == owner) {
			found = slab;
			break;
		}
		if (!slab->owner && slab->idle == slab->count)
			found = slab;
	}
	if (!found)
		return NULL;
	found->owner = owner;
	return slab_take(found);
}

static struct slab *slab_new(size_t piece_size, unsigned int count, int node,
			     struct pen_device *owner)
{
	struct slab *slab = os_calloc(1, sizeof(*slab) + count * sizeof(slab->pieces[0]));
	void *memory;

	if (!slab)
		return NULL;
	if (os_map_huge(count * piece_size, node, &memory)) {
		free(slab);
		return NULL;
	}
	os_not_inherited(memory, count * piece_size);
	slab->memory = memory;
	slab->piece_size = piece_size;
	slab->node = node;
	slab->owner = owner;
	slab->count = slab->idle = count;
	pthread_mutex_init(&slab->pin_lock, NULL);
	for (unsigned int i = 0; i < count; i++)
		slab->pieces[i] = (struct piece){
			.memory = slab->memory + i * piece_size,
			.size = piece_size,
			.slab = slab,
			.idle = true,
		};
	return slab;
}

static void slab_free(struct slab *slab)
{
	if (slab->state == PINNED)
		device_unpin(slab->owner, slab->memory, NULL);
	os_unmap(slab->memory, slab_size(slab));
	pthread_mutex_destroy(&slab->pin_lock);
	free(slab);
}

/* Add a slab to the pool: of the pieces that the job will ask for in any case, or of one. */
static bool pool_grow(const struct piece_budget *budget, int node, struct pen_device *owner)
{
	unsigned int count = budget->together > 1 ? (unsigned int)budget->together : 1;
	struct slab *slab = slab_new(budget->piece_size, count, node, owner);

	if (!slab && count > 1)
		slab = slab_new(budget->piece_size, 1, node, owner);
	if (!slab)
		return false;
	slab->next = pool;
	pool = slab;
	idle_bytes += slab_size(slab);
	return true;
}

struct piece *piece_take(struct piece_budget *budget, bool first, struct pen_device *device,
			 int *rc, struct pen_error *err)
{
	struct pen_device *owner = device->is_host ? NULL : device;
	int node = device_node(device);
	struct piece *piece;

	*rc = 0;
	if (!budget_take(budget, first))
		return NULL;
	pthread_mutex_lock(&pool_lock);
	piece = pool_find(budget->piece_size, node, owner);
	if (!piece && pool_grow(budget, node, owner))
		piece = pool_find(budget->piece_size, node, owner);
	if (budget->together)
		budget->together--;
	pthread_mutex_unlock(&pool_lock);
	if (!piece) {
		budget_put(budget);
		*rc = error_sys(err, -ENOMEM, "allocate staging memory for", device->name, -1);
		error_hint(err, "Lower the memory limit");
		return NULL;
	}
	/* Touched here, by the lane that will use it, so that lanes do it in parallel. */
	for (size_t at = 0; at < piece->size && !piece->touched; at += os_page_size())
		piece->memory[at] = 0;
	piece->touched = true;
	return piece;
}

int piece_pin(struct piece *piece, struct pen_device *device, struct pen_error *err)
{
	struct slab *slab = piece->slab;
	int rc = 0;

	if (device->is_host || atomic_load(&slab->state) != UNPINNED)
		return 0;
	assert(slab->owner == device);
	/* One registers for all; it may take milliseconds, in which others can read. */
	if (pthread_mutex_trylock(&slab->pin_lock))
		return -EAGAIN;
	if (atomic_load(&slab->state) == UNPINNED) {
		rc = device_pin(device, slab->memory, slab_size(slab), false, err);
		atomic_store(&slab->state, rc ? REFUSED : PINNED);
	}
	pthread_mutex_unlock(&slab->pin_lock);
	return rc;
}

static void unlink_slab(struct slab *slab)
{
	struct slab **link = &pool;

	while (*link != slab)
		link = &(*link)->next;
	*link = slab->next;
	idle_bytes -= slab_size(slab);
}

void piece_put(struct piece_budget *budget, struct piece *piece)
{
	struct slab *slab = piece->slab;
	bool spare = false;

	budget_put(budget);
	pthread_mutex_lock(&pool_lock);
	piece->idle = true;
	slab->idle++;
	idle_bytes += piece->size;
	if (slab->idle == slab->count) {
		/* The next job may ask again. */
		if (slab->state == REFUSED)
			slab->state = UNPINNED;
		spare = slab->piece_size != PIECE_SIZE || idle_bytes > POOL_KEEP;
		if (spare)
			unlink_slab(slab);
	}
	pthread_mutex_unlock(&pool_lock);
	if (spare)
		slab_free(slab);
}

void piece_trim(struct pen_device *device)
{
	struct slab *slab, *next;

	/* All under the lock: a device that owns a slab cannot be closed until it is free. */
	pthread_mutex_lock(&pool_lock);
	for (slab = pool; slab; slab = next) {
		next = slab->next;
		if (slab->idle < slab->count || (device && slab->owner != device))
			continue;
		unlink_slab(slab);
		slab_free(slab);
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
