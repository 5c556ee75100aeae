/* SPDX-License-Identifier: MIT */
/* Telling which groups are complete; see groups.h. */
#include <errno.h>
#include <stdlib.h>
#include "engine/groups.h"
#include "sys/os.h"

int groups_init(struct groups *groups, uint64_t count, const struct plan *plan,
		pthread_mutex_t *lock, pthread_cond_t *news, const atomic_int *eventfd)
{
	groups->lock = lock;
	groups->news = news;
	groups->eventfd = eventfd;
	groups->plan = plan;
	if (!count)
		return 0;
	groups->left = os_calloc(count, sizeof(groups->left[0]));
	groups->order = os_calloc(count, sizeof(groups->order[0]));
	if (!groups->left || !groups->order)
		return -ENOMEM;
	groups->count = count;
	for (size_t i = 0; i < plan->mark_count; i++)
		groups->left[plan->marks[i].group] += plan->marks[i].bytes;
	for (uint64_t group = 0; group < count; group++)
		if (!groups->left[group])
			groups->order[groups->entered++] = group + 1;
	return 0;
}

void groups_fini(struct groups *groups)
{
	free(groups->left);
	free(groups->order);
}

static void enter(struct groups *groups, uint64_t group)
{
	size_t at = atomic_fetch_add(&groups->entered, 1);
	int eventfd;

	if (at + 1 == groups->count)
		atomic_store(&groups->complete_ns, os_now());
	atomic_store(&groups->order[at], group + 1);
	/* Who makes the descriptor looks at `entered` afterwards: one of us sees the other. */
	eventfd = atomic_load(groups->eventfd);
	if (eventfd >= 0)
		os_eventfd_add(eventfd);
	/* Whoever is about to sleep has said so before the last look at `order`. */
	if (atomic_load(&groups->awaited)) {
		pthread_mutex_lock(groups->lock);
		pthread_cond_broadcast(groups->news);
		pthread_mutex_unlock(groups->lock);
	}
}

void groups_came(struct groups *groups, uint32_t first, uint32_t count)
{
	if (!groups->count)
		return;
	for (uint32_t i = first; i < first + count; i++) {
		const struct plan_request *request = &groups->plan->requests[i];

		for (uint32_t m = 0; m < request->mark_count; m++) {
			const struct plan_mark *mark =
				&groups->plan->marks[request->first_mark + m];

			if (atomic_fetch_sub(&groups->left[mark->group], mark->bytes) ==
			    mark->bytes)
				enter(groups, mark->group);
		}
	}
}

/* Move what has been entered and not told yet to `told`. */
static size_t tell(struct groups *groups, uint64_t *told, size_t room)
{
	size_t count = 0;

	while (count < room && groups->told < groups->count) {
		uint64_t entry = atomic_load(&groups->order[groups->told]);

		if (!entry)
			break;
		told[count++] = entry - 1;
		groups->told++;
	}
	return count;
}

size_t groups_tell(struct groups *groups, atomic_uint *running, uint64_t *told, size_t room,
		   const struct timespec *until)
{
	size_t count = 0;
	int rc = 0;

	if (!groups->count || !room)
		return 0;
	pthread_mutex_lock(groups->lock);
	atomic_store(&groups->awaited, true);
	while (!rc) {
		/* Asked before the look: what came before the end is seen by it. */
		bool ended = !atomic_load(running);

		count = tell(groups, told, room);
		if (count || ended || groups->told == groups->count)
			break;
		rc = pthread_cond_timedwait(groups->news, groups->lock, until);
	}
	atomic_store(&groups->awaited, false);
	pthread_mutex_unlock(groups->lock);
	return count;
}
