/* SPDX-License-Identifier: MIT */
/*
 * One writer for a folder: rank 0 has .penstock.lock locked (flock) from opening to closing, and
 * says in it who it is. The lock goes with the process, however that ends; the file stays, as who
 * removed it could remove one that another has just locked.
 *
 * A child of fork() would hold the lock as well, and workers that load data may outlive a trainer
 * that was killed: so children let go of it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/error.h"
#include "format/checkpoint.h"
#include "sys/os.h"

#define LOCK ".penstock.lock"
#define HOLDER_MAX 128

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct checkpoint_lock *held;	/* guarded by `mutex` */

static void let_go(void)
{
	for (; held; held = held->next) {
		os_close(held->fd);
		held->fd = -1;
	}
}

__attribute__((constructor)) static void watch_forks(void)
{
	os_at_fork(OS_FORK_CHECKPOINTS, &mutex, let_go);
}

static void remember(struct checkpoint_lock *lock)
{
	pthread_mutex_lock(&mutex);
	lock->next = held;
	held = lock;
	pthread_mutex_unlock(&mutex);
}

static void forget(struct checkpoint_lock *lock)
{
	struct checkpoint_lock **link = &held;

	pthread_mutex_lock(&mutex);
	while (*link && *link != lock)
		link = &(*link)->next;
	if (*link)
		*link = lock->next;
	pthread_mutex_unlock(&mutex);
}

/* For those who come later. If it cannot be written they are told less, that is all. */
static void say_who(int fd)
{
	char text[HOLDER_MAX], host[64];

	if (os_host(host, sizeof(host)))
		strcpy(host, "?");
	snprintf(text, sizeof(text), "%ld %s\n", (long)getpid(), host);
	if (!os_truncate(fd, 0))
		os_pwrite(fd, text, strlen(text), 0);
}

/* By the file itself: a number of a process means little across containers. */
static bool is_held_here(int fd)
{
	struct stat wanted, st;
	bool found = false;

	if (os_fstat(fd, &wanted))
		return false;
	pthread_mutex_lock(&mutex);
	for (const struct checkpoint_lock *lock = held; lock && !found; lock = lock->next)
		found = !os_fstat(lock->fd, &st) && st.st_dev == wanted.st_dev &&
			st.st_ino == wanted.st_ino;
	pthread_mutex_unlock(&mutex);
	return found;
}

static int taken(const struct pen_checkpoints *folder, int fd, struct pen_error *err)
{
	char text[HOLDER_MAX] = "", host[64] = "";
	long pid = 0;

	if (is_held_here(fd)) {
		error_set(err, -EBUSY, "write to", folder->path, -1,
			  "this process writes checkpoints there already");
		error_hint(err, "close() the first writer: a folder of checkpoints has one");
		return -EBUSY;
	}
	if (os_pread(fd, text, sizeof(text) - 1, 0) > 0 &&
	    sscanf(text, "%ld %63[^\n]", &pid, host) == 2)
		error_set(err, -EBUSY, "write to", folder->path, -1,
			  "process %ld on %s writes checkpoints there", pid, host);
	else
		error_set(err, -EBUSY, "write to", folder->path, -1,
			  "another process writes checkpoints there");
	error_hint(err, "Wait for it or stop it: a folder of checkpoints has one writer, rank 0");
	return -EBUSY;
}

/* File systems of networks often cannot; to refuse them would be no help. */
static bool has_no_locks(int rc)
{
	return rc == -EOPNOTSUPP || rc == -ENOSYS || rc == -ENOLCK || rc == -EINVAL;
}

int checkpoint_lock_take(struct pen_checkpoints *folder, struct pen_error *err)
{
	int fd = os_open(folder->fd, LOCK, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0666), rc;

	if (fd < 0) {
		error_sys(err, fd, "create " LOCK " in", folder->path, -1);
		if (fd == -EROFS || fd == -EACCES || fd == -EPERM)
			error_hint(err, "Who saves has to write there; who only reads steps opens "
				   "the folder for reading (in Python, read_only=True)");
		return fd;
	}
	rc = os_lock(fd);
	if (rc == -EAGAIN)
		taken(folder, fd, err);
	else if (has_no_locks(rc))
		snprintf(folder->warning, sizeof(folder->warning), "the file system has no locks "
			 "(%s): nothing keeps a second process from writing there", strerror(-rc));
	else if (rc)
		error_sys(err, rc, "lock " LOCK " in", folder->path, -1);
	if (rc) {
		os_close(fd);
		return rc == -EAGAIN ? -EBUSY : has_no_locks(rc) ? 0 : rc;
	}
	say_who(fd);
	folder->lock.fd = fd;
	remember(&folder->lock);
	return 0;
}

void checkpoint_lock_drop(struct pen_checkpoints *folder)
{
	forget(&folder->lock);
	if (folder->lock.fd >= 0)
		os_close(folder->lock.fd);
	folder->lock.fd = -1;
}
