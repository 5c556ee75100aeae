/* SPDX-License-Identifier: MIT */
/* The pool of staging memory: pieces, slabs, budgets; see pool.h. */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "mem/pool.h"
#include "sys/os.h"

/* Idle memory kept for the next job of a device; more than the default promise of one job would be
 * greed. */
#define POOL_KEEP ((size_t)128 << 20)

/* Whole: registered at once. Split: that was refused, or cannot be; each piece is asked for by
 * itself. */
enum { UNPINNED, WHOLE, SPLIT };

/* Pieces that were made together: one mapping, one registration. */
struct slab {
	struct slab *next;		/* in the pool */
	unsigned char *memory;
	size_t piece_size;
	int node;			/* wished NUMA node */
	struct pen_device *owner;	/* whose copies it is for; NULL: the host's */
	const struct piece_budget *maker;	/* who takes all of it first; NULL: has done so */
	unsigned int taken;		/* pieces that the maker has had */
	unsigned int count, idle;	/* pieces, and how many nobody has */
	bool gathers;			/* for jobs that gather ahead, and for no others */
	atomic_uint untouched;		/* pieces that have no pages yet */
	pthread_mutex_t pin_lock;	/* held by who registers it */
	atomic_int state;
	struct piece pieces[];
};

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
/* All slabs; guarded by pool_lock, as is what changes in them, except for what is atomic. */
static struct slab *pool;
/* Idle memory kept for the next job that gathers ahead: what the last one used, and a quarter more,
 * since lanes share it out differently each time. */
static uint64_t gather_keep;

static size_t slab_size(const struct slab *slab)
{
	return slab->count * slab->piece_size;
}

/* Slabs are not inherited: a child has only the words about them, and nothing to unpin. Those of
 * slabs that are in use stay, for the parent's jobs that the child still knows of. */
static void forget_pool(void)
{
	while (pool) {
		struct slab *slab = pool;

		pool = slab->next;
		if (slab->idle == slab->count)
			free(slab);
	}
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

static bool budget_take(struct piece_budget *budget, bool kept)
{
	int left = atomic_load(&budget->left);

	do {
		if (left <= (kept ? 0 : atomic_load(&budget->kept)))
			return false;
	} while (!atomic_compare_exchange_weak(&budget->left, &left, left - 1));
	if (kept)
		atomic_fetch_sub(&budget->kept, 1);
	budget_count(budget, (int64_t)budget->piece_size);
	return true;
}

static void budget_put(struct piece_budget *budget)
{
	budget_count(budget, -(int64_t)budget->piece_size);
	atomic_fetch_add(&budget->left, 1);
}

static struct piece *hand_out(struct piece *piece)
{
	assert(piece->idle);
	piece->idle = false;
	piece->slab->idle--;
	return piece;
}

/* Take an idle piece out of a slab that has one. */
static struct piece *slab_take(struct slab *slab)
{
	struct piece *piece = slab->pieces;

	while (!piece->idle)
		piece++;
	return hand_out(piece);
}

/* An idle piece that fits, if possible one that is registered. What another job has just made for
 * itself is left to it. */
static struct piece *pool_find(const struct piece_budget *budget, int node,
			       struct pen_device *owner)
{
	struct slab *slab, *found = NULL;

	for (slab = pool; slab; slab = slab->next) {
		if (!slab->idle || slab->maker || slab->piece_size != budget->piece_size ||
		    slab->gathers != budget->gathers || slab->node != node ||
		    slab->owner != owner)
			continue;
		found = slab;
		if (atomic_load(&slab->state) == WHOLE)
			break;
	}
	return found ? slab_take(found) : NULL;
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
	atomic_init(&slab->untouched, count);
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
	if (slab->state == WHOLE)
		device_unpin(slab->owner, slab->memory, NULL);
	for (unsigned int i = 0; i < slab->count; i++)
		if (slab->pieces[i].pinned)
			device_unpin(slab->owner, slab->pieces[i].memory, NULL);
	os_unmap(slab->memory, slab_size(slab));
	pthread_mutex_destroy(&slab->pin_lock);
	free(slab);
}

/* A new slab in the pool; `count` is what the job will take of it. */
static struct slab *pool_grow(const struct piece_budget *budget, unsigned int count, int node,
			      struct pen_device *owner)
{
	struct slab *slab = slab_new(budget->piece_size, count, node, owner);

	if (!slab)
		return NULL;
	slab->gathers = budget->gathers;
	slab->next = pool;
	pool = slab;
	return slab;
}

/* One of the pieces that the lanes take at the start. Each counts down `together`, and whoever
 * finds nothing idle makes a slab of all that are still to come. So each piece of it is taken and
 * touched, which registering it waits for; never twice by the maker before all were once. */
static struct piece *take_together(struct piece_budget *budget, int node,
				   struct pen_device *owner)
{
	unsigned int wanted = (unsigned int)budget->together--;
	struct slab *slab = pool;
	struct piece *piece;

	while (slab && slab->maker != budget)
		slab = slab->next;
	if (!slab) {
		piece = pool_find(budget, node, owner);
		if (piece)
			return piece;
		/* The pool could not keep more, and it would be made again for each job. */
		if (wanted > POOL_KEEP / budget->piece_size)
			wanted = (unsigned int)(POOL_KEEP / budget->piece_size);
		slab = wanted > 1 ? pool_grow(budget, wanted, node, owner) : NULL;
		if (!slab)
			return NULL;
		slab->maker = budget;
	}
	piece = hand_out(&slab->pieces[slab->taken++]);
	if (slab->taken == slab->count)
		slab->maker = NULL;
	return piece;
}

/* A lane goes without what it should have taken at the start. The slab that holds it will never be
 * complete, so nobody shall wait for that: its pieces are registered one by one. */
static void give_up_together(struct piece_budget *budget)
{
	pthread_mutex_lock(&pool_lock);
	budget->together = 0;
	for (struct slab *slab = pool; slab; slab = slab->next)
		if (slab->maker == budget) {
			slab->maker = NULL;
			atomic_store(&slab->state, SPLIT);
		}
	pthread_mutex_unlock(&pool_lock);
}

static void unlink_slab(struct slab *slab)
{
	struct slab **link = &pool;

	while (*link != slab)
		link = &(*link)->next;
	*link = slab->next;
}

/* Before a job that gathers makes memory: one slab less that another limit has left, and that this
 * job cannot use, so that both together are never much more than either limit. */
static void make_way(const struct piece_budget *budget, const struct pen_device *owner)
{
	struct slab *slab = pool;

	while (slab && !(slab->gathers && slab->owner == owner && slab->idle == slab->count &&
			 slab->piece_size != budget->piece_size))
		slab = slab->next;
	if (!slab)
		return;
	unlink_slab(slab);
	slab_free(slab);
}

struct piece *piece_take(struct piece_budget *budget, enum piece_need need,
			 struct pen_device *device, int *rc, struct pen_error *err)
{
	struct pen_device *owner = device->is_host ? NULL : device;
	int node = device_node(device);
	struct piece *piece = NULL;
	struct slab *slab;

	*rc = 0;
	if (!budget_take(budget, need != PIECE_MORE)) {
		if (need == PIECE_TOGETHER)
			give_up_together(budget);
		return NULL;
	}
	pthread_mutex_lock(&pool_lock);
	if (need == PIECE_TOGETHER && budget->together)
		piece = take_together(budget, node, owner);
	if (!piece)
		piece = pool_find(budget, node, owner);
	if (!piece) {
		if (budget->gathers)
			make_way(budget, owner);
		slab = pool_grow(budget, 1, node, owner);
		piece = slab ? slab_take(slab) : NULL;
	}
	pthread_mutex_unlock(&pool_lock);
	if (!piece) {
		budget_put(budget);
		*rc = error_sys(err, -ENOMEM, "allocate staging memory for", device->name, -1);
		error_hint(err, "Lower the memory limit");
		return NULL;
	}
	if (!piece->touched) {
		/* By the lane that will use it, so that lanes do it in parallel. */
		for (size_t at = 0; at < piece->size; at += os_page_size())
			piece->memory[at] = 0;
		piece->touched = true;
		atomic_fetch_add(&budget->made_bytes, piece->size);
		atomic_fetch_sub(&piece->slab->untouched, 1);
	}
	return piece;
}

static int pin_slab(struct slab *slab, struct pen_error *err)
{
	int rc = 0;

	if (atomic_load(&slab->untouched) || pthread_mutex_trylock(&slab->pin_lock))
		return -EAGAIN;
	if (atomic_load(&slab->state) == UNPINNED) {
		rc = device_pin(slab->owner, slab->memory, slab_size(slab), false, err);
		atomic_store(&slab->state, rc ? SPLIT : WHOLE);
	}
	pthread_mutex_unlock(&slab->pin_lock);
	return rc;
}

int piece_pin(struct piece *piece, struct pen_error *err)
{
	struct slab *slab = piece->slab;
	int rc = 0;

	if (!slab->owner || atomic_load(&slab->state) == WHOLE)
		return 0;
	if (atomic_load(&slab->state) == UNPINNED)
		rc = pin_slab(slab, err);
	if (atomic_load(&slab->state) != SPLIT || slab->count == 1 || piece->pinned)
		return rc;
	rc = device_pin(slab->owner, piece->memory, piece->size, false, err);
	piece->pinned = !rc;
	return rc;
}

bool piece_pinned(const struct piece *piece)
{
	return piece->slab->owner &&
	       (atomic_load(&piece->slab->state) == WHOLE || piece->pinned);
}

/* Is an idle slab of no use to the next job? What the driver did not register must not come as
 * a surprise to a job that may pin less. */
static bool useless(const struct slab *slab)
{
	return (!slab->gathers && slab->piece_size != PIECE_SIZE) ||
	       (slab->owner && atomic_load(&slab->state) != WHOLE);
}

/* Which of two idle slabs is given up first: the one of another size than the last job had, then
 * the smaller one, which is the cheapest to make again. */
static bool worth_less(const struct slab *slab, const struct slab *than,
		       const struct piece_budget *budget)
{
	bool other = slab->piece_size != budget->piece_size;

	if (!than || other != (than->piece_size != budget->piece_size))
		return !than || other;
	return slab_size(slab) < slab_size(than);
}

/* A slab of this owner's, and for this kind of job, that nobody uses and that is not worth keeping,
 * taken out of the pool; NULL: there is none. Others' are left to their own jobs: only those know
 * that the device is still there. */
static struct slab *pool_spare(const struct piece_budget *budget, const struct pen_device *owner)
{
	struct slab *slab, *least = NULL;
	uint64_t kept = 0;

	for (slab = pool; slab; slab = slab->next) {
		if (slab->idle < slab->count || slab->owner != owner ||
		    slab->gathers != budget->gathers)
			continue;
		if (useless(slab))
			break;
		kept += slab_size(slab);
		if (worth_less(slab, least, budget))
			least = slab;
	}
	if (!slab && kept > (budget->gathers ? gather_keep : POOL_KEEP))
		slab = least;
	if (slab)
		unlink_slab(slab);
	return slab;
}

void piece_put(struct piece_budget *budget, struct piece *piece)
{
	const struct pen_device *owner = piece->slab->owner;
	struct slab *spare;

	budget_put(budget);
	pthread_mutex_lock(&pool_lock);
	if (budget->gathers)
		gather_keep = atomic_load(&budget->peak_bytes) / 4 * 5;
	piece->idle = true;
	piece->slab->idle++;
	while ((spare = pool_spare(budget, owner)) != NULL) {
		pthread_mutex_unlock(&pool_lock);
		slab_free(spare);
		pthread_mutex_lock(&pool_lock);
	}
	pthread_mutex_unlock(&pool_lock);
}

uint64_t piece_kept(void)
{
	uint64_t kept = 0;

	pthread_mutex_lock(&pool_lock);
	for (const struct slab *slab = pool; slab; slab = slab->next)
		if (slab->gathers)
			kept += slab->idle * slab->piece_size;
	pthread_mutex_unlock(&pool_lock);
	return kept;
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
