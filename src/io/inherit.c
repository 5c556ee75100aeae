/* SPDX-License-Identifier: MIT */
/*
 * What a new file takes over from the one it replaces: owner, mode, access list, extended
 * attributes. Nobody but its writer may do with the new one what they could not do with the old.
 *
 * So where something that limits the rights cannot be kept, others get fewer of them: a group that
 * is not the old one has no more than everybody, and without the access list the owner alone has
 * any, since the list may say no to some whom the mode lets in.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include "io/replace.h"
#include "sys/os.h"

#define ACCESS_LIST "system.posix_acl_access"
/* XATTR_LIST_MAX and XATTR_SIZE_MAX. */
#define ATTRIBUTE_MAX 65536

struct attributes {
	int from, to;
	char names[ATTRIBUTE_MAX], value[ATTRIBUTE_MAX];
};

static bool begins(const char *name, const char *with)
{
	return !strncmp(name, with, strlen(with));
}

static bool not_allowed(int rc)
{
	return rc == -EPERM || rc == -EACCES || rc == -EOPNOTSUPP;
}

/* Not those that vouch for the old bytes, nor those that are a file system's own affair. */
static bool is_inherited(const char *name)
{
	static const char *const kinds[] = { "user.", "security.", "trusted.", "system." };
	static const char *const others[] = {
		ACCESS_LIST, "security.capability", "security.ima", "security.evm",
		"trusted.overlay.", "user.overlay.", "trusted.SGI_",
	};

	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
		if (begins(name, others[i]))
			return false;
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		if (begins(name, kinds[i]))
			return true;
	return false;
}

/* The access list, or that there is none: the directory may have given one to the new file. */
static int copy_access_list(struct attributes *all)
{
	int n = os_attribute(all->from, ACCESS_LIST, all->value, sizeof(all->value));

	if (n >= 0)
		return os_set_attribute(all->to, ACCESS_LIST, all->value, (size_t)n);
	if (n != -ENODATA && n != -EOPNOTSUPP)
		return n;
	n = os_remove_attribute(all->to, ACCESS_LIST);
	return n == -ENODATA || n == -EOPNOTSUPP ? 0 : n;
}

static int copy_attribute(struct attributes *all, const char *name)
{
	int n = os_attribute(all->from, name, all->value, sizeof(all->value));

	if (n == -ENODATA || not_allowed(n))
		return 0;
	return n < 0 ? n : os_set_attribute(all->to, name, all->value, (size_t)n);
}

/* Sets `narrow` where rights that the old file had in a list of its own are lost. */
static int copy_attributes(struct attributes *all, bool *narrow)
{
	int length = os_attributes(all->from, all->names, sizeof(all->names)), rc;

	if (length < 0)
		return length == -EOPNOTSUPP ? 0 : length;
	for (const char *name = all->names; name < all->names + length; name += strlen(name) + 1) {
		if (!is_inherited(name))
			continue;
		rc = copy_attribute(all, name);
		/* NFS has its access list among these. */
		if (rc && begins(name, "system."))
			*narrow = true;
		else if (rc && !not_allowed(rc) && begins(name, "user."))
			return rc;
	}
	return 0;
}

static int inherit_attributes(int from, int to, bool *narrow)
{
	struct attributes *all = os_calloc(1, sizeof(*all));
	int rc;

	if (!all)
		return -ENOMEM;
	all->from = from;
	all->to = to;
	if (copy_access_list(all))
		*narrow = true;
	rc = copy_attributes(all, narrow);
	free(all);
	return rc;
}

/* The owner and group, as far as they are ours to give; what is lost is taken from the mode. */
static int inherit_owner(const struct stat *old, int fd, mode_t *mode)
{
	struct stat own;
	int rc = os_fstat(fd, &own);

	if (rc || (old->st_uid == own.st_uid && old->st_gid == own.st_gid))
		return rc;
	rc = os_chown(fd, old->st_uid, old->st_gid);
	/* -EINVAL: an owner that this user namespace has no number for. */
	if (rc != -EPERM && rc != -EINVAL)
		return rc;
	if (old->st_uid != own.st_uid)
		*mode &= ~(mode_t)S_ISUID;
	rc = old->st_gid == own.st_gid ? 0 : os_chown(fd, (uid_t)-1, old->st_gid);
	if (rc == -EPERM || rc == -EINVAL) {
		*mode &= ~(mode_t)S_ISGID & (~(mode_t)S_IRWXG | (*mode & S_IRWXO) << 3);
		rc = 0;
	}
	return rc;
}

static int set_mode(int fd, mode_t mode)
{
	struct stat own;
	int rc = os_fstat(fd, &own);

	if (rc || (own.st_mode & 07777) == mode)
		return rc;
	return os_chmod(fd, mode);
}

static int inherit_from(int old, int fd, const struct stat *st, const char **step)
{
	mode_t mode = st->st_mode & 07777;
	bool narrow = old < 0;
	int rc;

	*step = "keep the owner of";
	rc = inherit_owner(st, fd, &mode);
	if (rc)
		return rc;
	*step = "keep the attributes of";
	if (old >= 0)
		rc = inherit_attributes(old, fd, &narrow);
	if (rc)
		return rc;
	/* Last: an owner or a list that is set changes it. */
	*step = "keep the mode of";
	return set_mode(fd, narrow ? mode & ~(mode_t)(S_IRWXG | S_IRWXO) : mode);
}

int inherit(const struct place *place, int fd, mode_t fresh, const char **step)
{
	struct stat st;
	int old, rc = os_lstat(place->directory, place->base, &st);

	*step = "stat";
	if (rc && rc != -ENOENT)
		return rc;
	if (rc || !S_ISREG(st.st_mode)) {
		*step = "set the mode of";
		rc = set_mode(fd, fresh);
		return rc ? rc : 1;
	}
	*step = "keep the attributes of";
	old = os_open(place->directory, place->base, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0);
	if (old < 0 && old != -EACCES)
		return old;
	rc = inherit_from(old, fd, &st, step);
	if (old >= 0)
		os_close(old);
	return rc;
}
