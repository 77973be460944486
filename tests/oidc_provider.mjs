// A certified OpenID Connect provider (npm oidc-provider): node oidc_provider.mjs FOLDER PORT SETTINGS
// FOLDER: where npm installed it. SETTINGS: a JSON file with redirect_uris and ttl. USERS beside it: read at each request,
// so that a test can change groups. PKCE with S256 is required.
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const [folder, port, settings] = process.argv.slice(2);
const { Provider } = await import(pathToFileURL(`${folder}/node_modules/oidc-provider/lib/index.js`));
const given = JSON.parse(readFileSync(settings));
const users = () => JSON.parse(readFileSync(given.users));
const issuer = `http://127.0.0.1:${port}`;
const provider = new Provider(issuer, {
  clients: [{
    client_id: 'fleetpulse',
    client_secret: given.secret,
    redirect_uris: given.redirect_uris,
    post_logout_redirect_uris: given.redirect_uris,
    grant_types: ['authorization_code'],
    response_types: ['code'],
  }],
  pkce: { required: () => true },
  scopes: ['openid', 'profile', 'email', 'groups'],
  claims: { openid: ['sub'], profile: ['name'], email: ['email', 'email_verified'], groups: ['groups'] },
  conformIdTokenClaims: false,
  ttl: { AccessToken: 3600, IdToken: 3600, Session: 3600, Interaction: 600, Grant: 3600, ...given.ttl },
  features: {
    devInteractions: { enabled: true },
    rpInitiatedLogout: { enabled: true },
    revocation: { enabled: true },
  },
  cookies: { keys: ['only-for-tests'] },
  jwks: given.jwks,
  findAccount: (_, id) => users()[id] && { accountId: id, claims: () => ({ sub: id, ...users()[id] }) },
});
provider.listen(Number(port), '127.0.0.1', () => console.log('ready'));
